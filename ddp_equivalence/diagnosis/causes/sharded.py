"""Models whose parameters are sharded: clipped by the norm of a shard, or never reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes.unreduced import SOME_NOT_REDUCED
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
    on_several_ranks,
)
from ddp_equivalence.diagnosis.lines.behind import lines_behind
from ddp_equivalence.diagnosis.lines.of_reduction import ignored_by_fsdp, lines_that_gave
from ddp_equivalence.diagnosis.lines.source import run_lines
from ddp_equivalence.diagnosis.lines.words import first_of, last_of, names_text
from ddp_equivalence.diagnosis.means_of_parts import (
    ADDED_TO_NORM,
    clips_norm,
    norm_before_clipping,
)
from ddp_equivalence.diagnosis.reduced import passes_without_sync
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.whole_tensors import IGNORED as IGNORED_ARGUMENTS

MOST_SHOWN = 4

MOST_BEHIND = 2

EQUAL = 1e-3
"""Factors and norms whose relative difference is smaller are equal."""


# Each rank clips its shards by the norm of these alone.


class _Factors(NamedTuple):
    """``ranks``: those that have elements of their own. ``has``: which elements each has, shape
    (ranks, elements). ``factors``: what these are multiplied by beside the right ones, (ranks,).
    """

    ranks: list[int]
    has: Tensor
    factors: Tensor


def _factors_of_shards(view: View) -> _Factors | None:
    """None if nothing is sharded, or if some rank's own elements are no multiple of the right
    ones.
    """
    has = view.observed.parts_of_ranks(view.parameters)
    if has is None or bool(has.all()) or not view.measured.is_known:
        return None
    held, right = view.measured.by_rank[0], view.expected
    own = has & ~has.all(0)  # every rank has the others, which may be clipped otherwise on each
    holders = [rank for rank, elements in enumerate(own) if bool(elements.any())]
    factors = []
    for elements in own[holders]:
        square = float(right[elements] @ right[elements])
        factor = float(held[elements] @ right[elements]) / square if square else 0.0
        left = (held[elements] - factor * right[elements]).norm()
        if not factor or float(left) > EQUAL * float(held[elements].norm()):
            return None
        factors.append(factor)
    return _Factors(holders, has[holders], torch.tensor(factors, dtype=torch.float64))


def _clipped_by_shard(view: View) -> Sequence[Prediction]:
    """The norms of the shards are in inverse proportion to their factors, but for shards that were
    too small to be clipped. The limit follows from the largest of them.
    """
    found = _factors_of_shards(view)
    if found is None:
        return ()
    ranks, has, factors = found
    if float(factors.max() - factors.min()) <= EQUAL * float(factors.abs().max()):
        return ()
    detail = "the factors differ by shard"
    if view.parameters.sample.is_whole:
        norms = torch.stack([view.expected[elements].norm() for elements in has])
        limit = (factors * norms).max()
        predicted = torch.clamp(limit / norms, max=float(factors.max()))
        if float((predicted - factors).abs().max()) > EQUAL * float(factors.max()):
            return ()
        each = zip(ranks, (norms / view.expected.norm()).tolist(), strict=True)
        shown = [f"rank {rank} {text_of(one, '.2g')}" for rank, one in each]
        more = ", ..." if len(shown) > MOST_SHOWN else ""
        detail = "parts of the norm that the shards of a rank have: "
        detail += ", ".join(shown[:MOST_SHOWN]) + more
    elif not _clips(view):
        return ()
    held = (torch.where(has, factors[:, None], 0.0).sum(0) / has.sum(0)) * view.expected
    return (Prediction(view.on_every_rank(held), detail),)


def _clips(view: View) -> list[CallSite]:
    return view.observed.calls.places(Kind.CLIP)


def _scaled_apart(view: View) -> list[CallSite]:
    """The lines that multiply by another number on each rank."""
    changed = view.observed.calls.changes(lambda call: bool(call.factor))
    return [
        place
        for place in changed
        if len({text_of(place.by_rank[rank][0].factor or 0.0, ".4g") for rank in place.ranks}) > 1
    ]


def _clip_of_shards_seen(view: View) -> Indication | None:
    if view.observed.parts_of_ranks(view.parameters) is None:
        return None
    factors = [
        [text_of(call.factor, ".4g") for call in view.observed.calls.of(rank) if call.factor]
        for rank in view.observed.by_rank
    ]
    is_alike = len(set(map(len, factors))) == 1  # or else they are not of the same lines
    is_apart = is_alike and any(len(set(one)) > 1 for one in zip(*factors, strict=True))
    because = "each rank multiplied its shards by a number of its own"
    return Indication(True, because) if is_apart else None


def _lines_of_shards(view: View) -> Sequence[PointedLine]:
    clips = [place.pointed(_own_norms(place), True) for place in _clips(view)[:1]]
    if clips:
        return clips
    for place in _scaled_apart(view)[-1:]:
        return _behind(view, place, "multiplies by another number on each rank")
    return []


def _behind(view: View, place: CallSite, note: str) -> list[PointedLine]:
    """The line with a note, after those that set what it reads."""
    behind = lines_behind(run_lines(view, place.ranks[0]), place.line, MOST_BEHIND)
    return [*behind, place.pointed(note, True)]


def _own_norms(place: CallSite) -> str:
    norms = {rank: calls[0].norm for rank, calls in place.by_rank.items()}
    known = [f"rank {rank} {text_of(one, '.3g')}" for rank, one in norms.items() if one is not None]
    return (
        f"finds another norm on each rank: {', '.join(known[:MOST_SHOWN])}"
        if len(known) > 1
        else ""
    )


def _mend_norm(view: View) -> str:
    if any(place.first.what == "FullyShardedDataParallel" for place in _sharding(view)):
        return "call clip_grad_norm_ of the FullyShardedDataParallel, which adds up all shards."
    return "add up the squares of all ranks' shards before the root, as clip_grad_norm_ does."


def _sharding(view: View) -> list[CallSite]:
    return view.observed.calls_of_all_steps.places(Kind.SHARDING)


# Parameters that several ranks have whole are added to the norm once for each of them.


def _counted_twice(view: View) -> Sequence[WrongFactor]:
    """The norm, if the squares of some parameters count several times."""
    if not view.parameters.sample.is_whole or not _clips_by_a_norm(view):
        return ()
    right = view.expected
    squares = {
        name: float(right[place] @ right[place]) for name, place in view.parameters.places.items()
    }
    total, found = sum(squares.values()), list[WrongFactor]()
    limits = {call.value for call in view.observed.calls.of(0) if clips_norm(call)}
    if isinstance(view.setting.training.clip, float | int):
        limits.add(float(view.setting.training.clip))
    layout = view.setting.layout
    on_node = {len(layout.ranks_on(node)) for node in range(layout.nodes)}
    times = {2, view.world_size, layout.nodes, *on_node} - {1}
    for names in _replicated(view):
        more = sum(squares[name] for name in names)
        for count in sorted(times) if more else ():
            times_more = ((total + (count - 1) * more) / total) ** 0.5
            detail = f"{_which(names, view)} count {count} times"
            factors = {1 / times_more}
            for limit in filter(None, limits):
                whole = total**0.5 * times_more + ADDED_TO_NORM  # if the reference does not clip
                factors.add(limit / whole)
                before = norm_before_clipping(view, limit)
                if before is not None:
                    more_than_it = before * times_more + ADDED_TO_NORM
                    factors.add((before + ADDED_TO_NORM) / more_than_it)
            found += [WrongFactor(one, detail) for one in factors]
    return found


def _clips_by_a_norm(view: View) -> bool:
    """True if torch clipped by a norm, or if a single number was reduced, such as its square, and
    gradients were made smaller.
    """
    calls = view.observed.calls.of(0) if view.observed.covers_every_rank else ()
    reduced = [one.collective for one in calls if one.collective is not None]
    of_numbers = any(one.elements == 1 and one.reduce_op for one in reduced)
    is_smaller = any(0 < (one.factor or 0) < 1 for one in calls)
    return (of_numbers and is_smaller) or any(map(clips_norm, calls))


def _which(names: tuple[str, ...], view: View) -> str:
    is_all = len(names) == len(view.parameters.names)
    return "all parameters" if is_all else names_text(names)


def _replicated(view: View) -> Iterator[tuple[str, ...]]:
    """What may count several times: those that each rank has whole where others are sharded, those
    with one dimension, such as biases and the weights of norms, and all, as hybrid sharding has
    them on every node.
    """
    has = view.observed.parts_of_ranks(view.parameters)
    if has is not None:
        places = view.parameters.places.items()
        yield tuple(name for name, place in places if bool(has[:, place].all()))
    yield tuple(name for name in view.parameters.names if name in view.setting.vectors)
    yield view.parameters.names


def _lines_of_norm(view: View) -> Sequence[PointedLine]:
    single = view.observed.calls.collectives(lambda _, of: of.elements == 1 and bool(of.reduce_op))
    for place in single[-1:]:
        return _behind(view, place, "adds up the squares of the ranks")
    return [place.pointed("clips with this norm", True) for place in _clips(view)[:1]]


# FSDP was told not to reduce.


def _without_sync(view: View) -> dict[str, list[bool]] | None:
    """Parameter -> for each backward pass of rank 0, whether FSDP was told not to reduce it; None
    if it never was, or if this is not known.
    """
    if not view.observed.covers_every_rank:
        return None
    passes = passes_without_sync(view.observed.calls.of(0))
    if not any(passes):
        return None
    return {name: [name in off for off in passes] for name in view.parameters.names}


def _not_synchronised(view: View) -> Sequence[Prediction]:
    """What backward passes up to the last reduced one have added; FSDP takes the mean."""
    off = _without_sync(view)
    if off is None or not any(passes[-1] for passes in off.values() if passes):
        return ()
    found = []
    for by_rank in view.micro_batch_gradients:
        held = view.expected.clone()
        for name, place in view.parameters.places.items():
            reduced = [at for at, is_off in enumerate(off[name]) if not is_off]
            if off[name] and off[name][-1]:
                last = reduced[-1] + 1 if reduced else 0
                each = [sum((one[place] for one in of[:last]), 0 * held[place]) for of in by_rank]
                held[place] = torch.stack(each).mean(0)
        found.append(Prediction(view.on_every_rank(held), _passes_left(off)))
    return found


def _passes_left(off: dict[str, list[bool]]) -> str:
    passes = next(one for one in off.values() if one and one[-1])
    left = len(passes) - max((at + 1 for at, is_off in enumerate(passes) if not is_off), default=0)
    count = "the last" if left == 1 else f"the last {left}"
    verb = "is" if left == 1 else "are"
    return f"{count} of {len(passes)} backward passes of each rank {verb} not reduced"


def _sync_off_seen(view: View) -> Indication | None:
    off = _without_sync(view)
    if off is None:
        return None
    count = sum(1 for passes in off.values() if passes and passes[-1])
    if not count:
        return Indication(False, "FSDP was told to reduce the last backward pass")
    because = f"it was in force for {count} of {len(off)} parameters in the last backward pass"
    return Indication(True, f"set_requires_gradient_sync(False): {because}")


def _lines_of_sync(view: View) -> Sequence[PointedLine]:
    off = view.observed.calls.places(Kind.SYNCHRONISATION, where=lambda call: not call.value)
    for place in off[-1:]:
        return _behind(view, place, "switches the reduction off for the last backward pass")
    return []


# FSDP was told to ignore parameters, or in which type to reduce.

_NOT_REDUCED = next(one for one in SOME_NOT_REDUCED if one.name == "parameter_not_reduced")


def _lines_that_ignore(view: View) -> Sequence[PointedLine]:
    """What says which parameters are ignored, and what reduces the others."""
    told = view.observed.calls_of_all_steps.places(Kind.IGNORE)
    given = lines_that_gave(view, told, IGNORED_ARGUMENTS)
    others = _NOT_REDUCED.lines(view)
    reducing = [one for one in others if view.observed.calls.reductions and one.is_fault]
    return [*given, *(replace(one, is_fault=not given) for one in reducing)] if given else others


def _ignored_seen(view: View) -> Indication | None:
    differing, ignored = view.measured.differing, ignored_by_fsdp(view)
    if not ignored:
        return None
    is_all = bool(differing) and differing <= ignored
    return Indication(
        is_all, f"FSDP was told to ignore {'these' if is_all else 'other'} parameters"
    )


# The optimizer steps what the model no longer has.


def _replaced(view: View) -> set[str]:
    if not view.observed.covers_every_rank:
        return set()
    places = view.observed.calls_of_all_steps.places(Kind.REPLACED)
    return {name for place in places for name in place.names}


def _never_stepped(view: View) -> Sequence[Prediction]:
    """The replaced parameters do not move; all others are right."""
    names = frozenset(_replaced(view))
    if not names:
        return ()
    held = view.parameters.combined(0 * view.expected_by_rank, view.expected_by_rank, names)
    return (Prediction(held, names_text(sorted(names))),)


def _replaced_seen(view: View) -> Indication | None:
    names = _replaced(view)
    if not names:
        return None
    because = f"an optimizer stepped {len(names)} of {len(view.parameters.names)} parameters as "
    return Indication(True, f"{because}they were before FSDP replaced them by shards", True)


def _lines_of_replaced(view: View) -> Sequence[PointedLine]:
    calls = view.observed.calls_of_all_steps
    shards = last_of(_sharding(view), "replaces the parameters by shards", is_fault=False)
    made = first_of(calls.places(Kind.OPTIMIZER), "the optimizer gets what is there before", True)
    if made and shards:
        # A function may build it; what counts is where it is called before the model is sharded.
        way = (made[0].line, *calls.places(Kind.OPTIMIZER)[0].first.callers)
        function = shards[0].line.function
        made = [replace(made[0], line=next((o for o in way if o.function == function), way[0]))]
    return [*made, *shards]


CLIPPED_BY_SHARD = Hypothesis(
    name="local_norm_clipped",
    sentence="Each rank clipped its shards by the norm of its own shards, not by the norm of the "
    "whole gradient, so that shards were multiplied by different numbers.",
    look_at="torch.nn.utils.clip_grad_norm_ on a FullyShardedDataParallel, or a norm of "
    "to_local() that is not added up over the ranks",
    headline="shards are clipped by their own norms",
    tell_apart="Use a max_norm that no gradient exceeds: this difference then goes away.",
    applies=on_several_ranks,
    held=_clipped_by_shard,
    indication=_clip_of_shards_seen,
    lines=_lines_of_shards,
    mend=_mend_norm,
)

COUNTED_TWICE = Hypothesis(
    name="replicated_norm_counted_twice",
    sentence="Parameters that several ranks have whole were added to the norm once for each of "
    "these ranks, so that gradients were clipped too much.",
    look_at="the norm that is added up over tensor-parallel or expert-parallel ranks: replicated "
    "parameters count once",
    headline="replicated parameters count twice in the norm",
    tell_apart="Use a max_norm that no gradient exceeds: this difference then goes away.",
    applies=on_several_ranks,
    multiples=_counted_twice,
    lines=_lines_of_norm,
    mend="add the squares of replicated parameters to the norm on one rank only.",
)

SYNC_OFF = Hypothesis(
    name="gradient_sync_off",
    sentence="FSDP was told not to reduce the last backward passes, whose gradients never reach "
    "the shards.",
    look_at="set_requires_gradient_sync: it must be True for the last micro-batch",
    headline="the last backward is not reduced",
    tell_apart="Use a single micro-batch: this difference then goes away, or is another one.",
    held=_not_synchronised,
    indication=_sync_off_seen,
    lines=_lines_of_sync,
    mend="call set_requires_gradient_sync(True) before the last micro-batch of a step.",
)

IGNORED = Hypothesis(
    name="ignored_parameter",
    sentence="FSDP was told to ignore some parameters, and nothing else reduces them: every rank "
    "holds its own gradient of them.",
    look_at="ignored_params of fully_shard, or ignored_states of FullyShardedDataParallel",
    headline="some parameters are ignored by FSDP",
    tell_apart="Leave the argument out: this difference then goes away.",
    held=lambda view: _NOT_REDUCED.predict(view) if ignored_by_fsdp(view) else (),
    indication=_ignored_seen,
    lines=_lines_that_ignore,
    mend=lambda view: (
        f"reduce {names_text(sorted(view.measured.differing))} yourself, or do not ignore "
        f"{'it' if len(view.measured.differing) == 1 else 'them'}."
    ),
)

BUILT_BEFORE = Hypothesis(
    name="optimizer_built_before_sharding",
    sentence="The optimizer was built before FSDP replaced the parameters by shards: it steps "
    "tensors that the model no longer has, and these get no gradient.",
    look_at="the order of fully_shard(model) or FullyShardedDataParallel(model) and of the line "
    "that builds the optimizer",
    headline="the optimizer has parameters from before sharding",
    tell_apart="Compare the weights, and not the gradients.",
    held=_never_stepped,
    indication=_replaced_seen,
    lines=_lines_of_replaced,
    mend=lambda view: "build the optimizer after the model is sharded.",
    of_optimizer=True,
)
