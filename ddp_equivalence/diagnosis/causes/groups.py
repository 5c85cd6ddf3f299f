"""Ranks or nodes are missing in the sum, or count in it more than once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    divided_by_ranks,
    indication_if,
    on_every_rank,
    on_several_ranks,
    ranks_by_number,
    where_all_report,
)
from ddp_equivalence.diagnosis.lines.of_data import lines_that_replace_rows
from ddp_equivalence.diagnosis.lines.of_reduction import (
    lines_of_left_out,
    lines_of_small_groups,
    lines_that_choose_groups,
    ranks_without_gradient,
    sharded_names,
    way_to,
)
from ddp_equivalence.diagnosis.lines.origins import chosen, gone_through
from ddp_equivalence.diagnosis.lines.source import run_lines
from ddp_equivalence.diagnosis.lines.words import first_of, in_order, last_of, names_text
from ddp_equivalence.diagnosis.means_of_parts import gradients_by_backward
from ddp_equivalence.diagnosis.reduced import (
    Groups,
    Repeated,
    groups_text,
    reduced_only_in_subgroups,
    separate_groups,
    sums_repeated,
    wrapped_groups,
)
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind
from ddp_equivalence.measurement.gradient_watch import factor_between

NO_WEIGHT = 1e-3
"""A rank is tried as left out if its weight, relative to the largest, is smaller than this."""


def _groups_seen(view: View) -> Groups:
    """The groups of the step's own reductions, or those of DDP unless these are the nodes.

    What DDP reduces in each node alone is another cause.
    """
    of_ddp = wrapped_groups(view)
    nodes = tuple(sorted(view.setting.ranks_by_node))
    return separate_groups(view) or (() if of_ddp == nodes else of_ddp)


def _in_groups(view: View, groups: Groups) -> Iterator[Prediction]:
    """The mean or the sum of the gradients of the ranks in each rank's own group."""
    for local in view.local_gradients if groups else ():
        sums = torch.empty_like(local)
        sizes = torch.empty(view.world_size, 1, dtype=local.dtype)
        for group in groups:
            ranks = list(group)
            sums[ranks] = local[ranks].sum(0)
            sizes[ranks] = len(ranks)
        for divisor, detail in (
            (sizes, "each group divides by its own size"),
            (view.world_size, f"each group divides by {view.world_size}, the number of all ranks"),
            (1, "nothing is divided"),
        ):
            yield Prediction(view.on_reporting_ranks(sums / divisor), detail)


def _seen_in_groups(view: View) -> Indication | None:
    groups = _groups_seen(view)
    if not groups:
        return None
    if lines_that_replace_rows(view):
        return Indication(False, "a collective gave ranks the rows of others")
    several = tuple(group for group in groups if len(group) > 1)
    alone = [group[0] for group in groups if len(group) == 1]
    because = f"gradients were reduced in {groups_text(groups)}; none joins them"
    if alone and several:
        because = f"gradients were reduced in {groups_text(several)}; {ranks_by_number(alone)} "
        because += f"reduced {'theirs' if len(alone) > 1 else 'its own'} with no other rank"
    return Indication(True, because)


def _lines_of_groups(view: View) -> Sequence[PointedLine]:
    """Where the groups are made, and where gradients are reduced in them."""
    calls = view.observed.calls
    reduced = [
        place.pointed(
            f"{len(place.calls)} {place.op}, in {groups_text(place.groups)}; "
            f"none has all {view.world_size} ranks",
            is_fault=True,
        )
        for place in calls.reductions
    ]
    if not reduced:
        return _lines_of_wrapper(view)
    return in_order(
        view, reduced[0], *lines_that_choose_groups(view, calls.reductions), *reduced[1:2]
    )


def _lines_of_wrapper(view: View) -> Sequence[PointedLine]:
    """Where the groups are made, and where DDP or its communication hook is given one."""
    sharded, calls = lines_of_small_groups(view), view.observed.calls_of_all_steps
    if sharded:
        return sharded
    if _hook_has_the_group(view):
        note = "the hook reduces in a group of some ranks"
        return last_of(calls.places(Kind.HOOK), note)
    wrapped = calls.places(Kind.WRAP) or view.observed.calls.backwards
    made = first_of(calls.places(Kind.NEW_GROUP), is_fault=False)
    return [*made, *last_of(wrapped, "DDP reduces in a group of some ranks")]


def _hook_has_the_group(view: View) -> bool:
    """True if DDP itself has all ranks, and was given a communication hook."""
    sizes = [wrapper.logged.get("world_size") for wrapper in view.observed.wrappers]
    has_all = bool(sizes) and all(size == view.world_size for size in sizes)
    return has_all and bool(view.observed.calls_of_all_steps.places(Kind.HOOK))


def _mend_groups(view: View) -> str:
    count = view.world_size
    if sharded_names(view):
        return f"give FSDP a mesh of all {count} ranks."
    if view.observed.wrappers and not _hook_has_the_group(view):
        return f"make DDP without process_group: it then averages over all {count} ranks."
    return f"reduce over all {count} ranks{divided_by_ranks(view)}."


# Gradients are averaged inside each node, and nothing is reduced between the nodes. Where the
# step's own calls show the groups, these are the cause, also if they are the nodes.


def _in_nodes(view: View) -> Sequence[Prediction]:
    nodes = tuple(view.setting.ranks_by_node)
    is_no_group = len(nodes) in (1, view.world_size)
    return [] if is_no_group or separate_groups(view) else list(_in_groups(view, nodes))


def _seen_in_some(view: View) -> Indication | None:
    """Looks for reductions that were all issued in groups of some ranks."""
    if separate_groups(view) or not reduced_only_in_subgroups(view):
        return None
    groups = wrapped_groups(view)
    if groups and groups != tuple(sorted(view.setting.ranks_by_node)):
        return Indication(False, f"DDP reduced in {groups_text(groups)}, which are not the nodes")
    return Indication(True, "gradients were reduced in groups of some ranks, and not among all")


def _without_ranks(view: View) -> Sequence[Prediction]:
    """The gradients without the ranks that may be left out, unless these are a whole node."""
    nodes = view.setting.ranks_by_node
    whole_nodes = [ranks for ranks in nodes if len(ranks) > 1 and len(nodes) > 1]
    left_out = [ranks for ranks in _ranks_that_may_be_left_out(view) if ranks not in whole_nodes]
    return [one for ranks in left_out for one in _predictions_without(view, ranks)]


def _without_node(view: View) -> Sequence[Prediction]:
    nodes = view.setting.ranks_by_node
    left_out = _ranks_that_may_be_left_out(view) if len(nodes) > 1 else []
    return [
        replace(prediction, detail=f"node {node}: {prediction.detail}")
        for node, ranks in enumerate(nodes)
        if ranks in left_out
        for prediction in _predictions_without(view, ranks)
    ]


def _ranks_that_may_be_left_out(view: View) -> list[tuple[int, ...]]:
    """The sets of ranks that have no weight in what some rank holds.

    If the weights cannot be determined, each single rank.
    """
    if view.world_size == 1:
        return []
    if view.weights_of_ranks is None:
        return [(rank,) for rank in range(view.world_size)]
    candidates = []
    for weights in view.weights_of_ranks.abs():
        without_weight = torch.nonzero(weights < NO_WEIGHT * weights.max()).flatten().tolist()
        if 0 < len(without_weight) < view.world_size:
            candidates.append(tuple(without_weight))
    return list(dict.fromkeys(candidates))


def _predictions_without(view: View, left_out: tuple[int, ...]) -> Iterator[Prediction]:
    """The mean or the sum of the other ranks' gradients, for every candidate for the gradients."""
    own_ranks, names = list(left_out), ranks_by_number(left_out)
    others = [rank for rank in range(view.world_size) if rank not in left_out]
    divisors: dict[int, str] = {
        view.world_size: f"{names} left out, but counted in the divisor {view.world_size}",
        len(others): f"{names} left out, and not counted in the divisor {len(others)}",
    }
    if view.parts.add_up_to_the_big_batch:
        divisors[1] = f"{names} left out"
    for local in view.local_gradients:
        # If the gradients of these ranks are zero, leaving them out changes nothing. If they are
        # like the others', there is only another factor, which has other reasons.
        if not bool(local[own_ranks].any()) or nearly_equal(local[others].mean(0), local.mean(0)):
            continue
        for divisor, detail in divisors.items():
            held = local[others].sum(0) / divisor
            yield Prediction(view.on_every_rank(held), detail)
            # If only one rank is not left out, all hold their own gradients: another cause.
            if view.setting.every_rank_reports and len(others) > 1:
                by_rank = held.expand(view.world_size, -1).clone()
                by_rank[own_ranks] = local[own_ranks]
                own = "holds its own gradient" if len(left_out) == 1 else "hold their own gradients"
                yield Prediction(by_rank, f"{detail}; {names} {own}")


def _ranks_without_weight(view: View) -> tuple[int, ...]:
    """The ranks whose gradients are missing; () if that is not known."""
    sets = _ranks_that_may_be_left_out(view) if view.weights_of_ranks is not None else []
    return sets[0] if sets else ranks_without_gradient(view)


def _lines_of_left_out(view: View) -> Sequence[PointedLine]:
    return lines_of_left_out(view, _ranks_without_weight(view))


def _without_one_rank(view: View) -> Iterator[Prediction]:
    """For the parameters that differ, the mean to which one rank adds nothing.

    Where nothing was observed to be frozen, every rank is tried.
    """
    differing, combined = view.measured.differing, view.parameters.combined
    shown = names_text(sorted(differing))
    ranks = sorted(_ranks_with_frozen_parameters(view)) or range(view.world_size)
    for local in view.local_gradients if differing else ():
        for frozen_on in ranks:
            others = [rank for rank in range(view.world_size) if rank != frozen_on]
            by_rank = view.on_every_rank(local[others].sum(0) / view.world_size)
            detail = f"{ranks_by_number([frozen_on])}: {shown}"
            yield Prediction(combined(by_rank, view.expected_by_rank, differing), detail)
            # The rank itself may hold no gradient of these parameters: None or zero.
            if frozen_on in view.setting.reporting_ranks:
                by_rank = by_rank.clone()
                row = view.setting.reporting_ranks.index(frozen_on)
                by_rank[row] = torch.zeros_like(view.expected)
                yield Prediction(combined(by_rank, view.expected_by_rank, differing), detail)


def _ranks_with_frozen_parameters(view: View) -> set[int]:
    """The ranks that freeze a differing parameter which is not frozen on all ranks."""
    frozen_by_rank = {rank: set(seen.frozen) for rank, seen in view.observed.by_rank.items()}
    frozen_on_some = set[str]().union(*frozen_by_rank.values())
    frozen_on_all = frozen_on_some.intersection(*frozen_by_rank.values())
    concerned = view.measured.differing - frozen_on_all
    return {rank for rank, frozen in frozen_by_rank.items() if concerned & frozen}


def _frozen(view: View) -> Indication | None:
    if not view.observed.by_rank:
        return None
    ranks = sorted(_ranks_with_frozen_parameters(view))
    return indication_if(
        bool(ranks),
        f"requires_grad of a parameter that differs was False on {ranks_by_number(ranks)}",
        "requires_grad was the same on all ranks",
        conclusive=True,
    )


def _lines_that_freeze(view: View) -> Sequence[PointedLine]:
    frozen = _ranks_with_frozen_parameters(view)
    places = view.observed.calls.places(
        Kind.REQUIRES_GRAD,
        where=lambda call: not call.value and bool(view.measured.differing & set(call.names)),
    )
    return [
        place.pointed(
            f"requires_grad = False for {names_text(place.names)} on "
            f"{ranks_by_number(place.ranks)}",
            is_fault=True,
        )
        for place in places
        if frozen >= set(place.ranks)
    ][:2]


def _counted_again(view: View) -> Sequence[Prediction]:
    """The big batch, in which what went into several sums counts once more for each rank."""
    repeated = _repeated(view)
    if not repeated:
        return ()
    predicted = view.expected.clone()
    gradients: Tensor | None = None
    for name, one in repeated.items():
        place = view.parameters.places[name]
        if len(set(one.counts)) == 1:
            predicted[place] = one.counts[0] * view.expected[place]
            continue
        if gradients is None:
            gradients = torch.stack(gradients_by_backward(view) or [torch.zeros(1, 0)]).sum(1)
        if gradients.shape != (len(one.counts), len(view.expected)):
            return ()
        weight = factor_between(gradients.sum(0), view.expected, NEGLIGIBLE)
        if not weight:  # the big batch is no multiple of the sum of all passes
            return ()
        counts = torch.tensor(one.counts, dtype=gradients.dtype)
        predicted[place] = weight * (counts @ gradients)[place]
    return on_every_rank(view, predicted, detail=names_text(sorted(repeated)))


def _repeated(view: View) -> dict[str, Repeated]:
    """What was added up again, if all that differs is among it."""
    repeated, differing = sums_repeated(view), view.measured.differing
    if not differing <= set(repeated):
        return {}
    return {name: one for name, one in repeated.items() if name in differing}


def _several_sums(view: View) -> Indication | None:
    repeated = _repeated(view)
    if not repeated:
        return None
    most = max(len(one.calls) for one in repeated.values())
    because = f"the same gradients went into {most} sums over the same ranks"
    return Indication(True, because, all(map(_at_once, repeated.values())))


def _at_once(one: Repeated) -> bool:
    """True if two sums of one gradient returned a handle in the same backward pass.

    They may then run at the same time, and nobody can say what the gradient is afterwards.
    """
    passes = [
        call.backwards
        for call in one.calls
        if call.collective is not None and call.collective.asynchronous
    ]
    return len(passes) > len(set(passes))


def _lines_that_add_again(view: View) -> Sequence[PointedLine]:
    """Where gradients are added up again, and what decided that this is done."""
    repeated = _repeated(view)
    names = names_text(sorted(repeated))
    calls: set[Call] = {call for one in repeated.values() for call in one.calls}
    places = view.observed.calls.places(Kind.COLLECTIVE, where=lambda call: call in calls)
    if len(places) != 1:
        before = first_of(places, f"all_reduces {names}", is_fault=False)
        return [*before, *last_of(places, "adds up the same gradients again")]
    again = places[0]
    times = {len(one.calls) for one in repeated.values()}
    often = f"{min(times)} to {max(times)}" if len(times) > 1 else f"{max(times)}"
    note = f"all_reduces {names} {often} times"
    listed = chosen(gone_through(run_lines(view, again.ranks[0]), way_to(view, again.first)))
    lists = [PointedLine(listed.line, "makes what the loop goes over")] if listed else []
    return [again.pointed(note, is_fault=True), *lists]


MORE_THAN_ONCE = Hypothesis(
    name="reduced_more_than_once",
    sentence="Gradients that were already added up over ranks were added up over the same ranks "
    "once more.",
    look_at="the loop or the hooks that all-reduce: a tied weight that is listed under each of its "
    "names, a second loop over the same gradients, or a reduction after every micro-batch of a "
    "window",
    headline="gradients are reduced more than once",
    tell_apart="Use another world size: no other cause has a factor that changes with it.",
    held=_counted_again,
    indication=_several_sums,
    lines=_lines_that_add_again,
    mend="reduce each gradient once in a step, after the last backward that adds to it.",
)

SEPARATE_GROUPS = (
    Hypothesis(
        name="reduced_in_wrong_group",
        sentence="Gradients were reduced only within groups of ranks, and nothing joins these "
        "groups.",
        look_at="the process group that is given to all_reduce, and what joins the groups "
        "afterwards",
        headline="gradients stay within groups of ranks",
        tell_apart="Gradients alone may not decide: look at the group of each all_reduce.",
        applies=where_all_report,
        held=lambda view: list(_in_groups(view, _groups_seen(view))),
        indication=_seen_in_groups,
        lines=_lines_of_groups,
        mend=_mend_groups,
    ),
    Hypothesis(
        name="nodes_not_reduced",
        sentence="Gradients were reduced inside each node, and nothing was reduced between the "
        "nodes.",
        look_at="the process group of DistributedDataParallel or the mesh of a hybrid strategy, "
        "and the reduction between nodes that must follow",
        headline="nothing is reduced between nodes",
        tell_apart="Place the ranks on other nodes: these gradients then change with it.",
        applies=where_all_report,
        held=_in_nodes,
        indication=_seen_in_some,
        lines=_lines_of_wrapper,
        mend=_mend_groups,
    ),
)

LEFT_OUT = (
    Hypothesis(
        name="rank_left_out",
        sentence="The gradient that a rank computed is missing from the gradients of all other "
        "ranks.",
        look_at="the process group that gradients are reduced in, and early returns before "
        "all_reduce",
        headline="other ranks lack a rank's gradient",
        tell_apart="Use more than one rank on every node.",
        held=_without_ranks,
        lines=_lines_of_left_out,
        mend="let the gradient of every rank count in an all_reduce of all {ranks}{divided}.",
    ),
    Hypothesis(
        name="node_left_out",
        sentence="The gradients that the ranks of a node computed are missing from the gradients "
        "of all other nodes.",
        look_at="the process group between the nodes, and the rank of each node that belongs to it",
        headline="other nodes lack a node's gradients",
        tell_apart="Use more than one rank on every node.",
        held=_without_node,
        lines=_lines_of_left_out,
        mend="let the gradient of every rank count in an all_reduce of all {ranks}{divided}.",
    ),
)

FROZEN = Hypothesis(
    name="parameter_frozen_on_one_rank",
    sentence="A parameter requires no gradient on one rank, so that this rank adds nothing to its "
    "average.",
    look_at="requires_grad set under a condition that is not the same on all ranks",
    headline="requires_grad differs between ranks",
    tell_apart="Gradients alone cannot decide: compare requires_grad on all ranks.",
    applies=on_several_ranks,
    held=lambda view: list(_without_one_rank(view)),
    indication=_frozen,
    lines=_lines_that_freeze,
    mend=lambda view: (
        f"set requires_grad=True on all ranks for {names_text(sorted(view.measured.differing))}."
    ),
)
