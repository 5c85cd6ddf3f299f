"""The way of each gradient through a step: of whose gradients it is made after each call."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.source import called_name, place_at
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.where.pieces import Pieces
from ddp_equivalence.diagnosis.where.whereabouts import ranked
from ddp_equivalence.measurement.calls import (
    Call,
    CodeLine,
    GradientState,
    Kind,
    thinned,
    unpacked,
)
from ddp_equivalence.measurement.gradient_watch import SAME_FACTOR, factor_between
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.operation_log import UNWRITTEN
from ddp_equivalence.measurement.sharded_gradients import Kept

# Says of which ranks' own gradients a gradient is a mixture, and in which weights.

SAME_WEIGHT = 1e-3
"""Weights that differ by less than this, relative to the largest one, are equal."""

SPARE = 3
"""A mixture of n gradients is believed only of n elements and so many more."""


@dataclass(frozen=True)
class Mix:
    """``weights``: of the pieces of all ranks, shape (pieces,)."""

    weights: Tensor

    @property
    def uniform(self) -> float | None:
        """The weight that all pieces have; None if they differ."""
        most = float(self.weights.abs().max()) if len(self.weights) else 0.0
        spread = float(self.weights.max() - self.weights.min()) if len(self.weights) else 0.0
        return float(self.weights.mean()) if spread <= SAME_WEIGHT * most else None


@dataclass(frozen=True)
class Mixtures:
    """``own``: parameter -> what each piece computed, shape (pieces, elements that are kept).

    ``ranks`` and ``numbers``: of each piece. ``tolerance``: the largest relative difference of two
    equal vectors. ``groups``: sets of ranks in which something was reduced.
    """

    own: Mapping[str, Tensor]
    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    tolerance: float
    groups: tuple[tuple[int, ...], ...] = ()

    def of(self, rank: int, values: Mapping[str, Kept]) -> Mix | None:
        """The mixture that these gradients of a rank are; None if they are none, or if too few
        elements are known.
        """
        own_of = {
            name: self.own[name] if kept.numbers is None else self.own[name][:, kept.numbers]
            for name, kept in values.items()
            if name in self.own
        }
        if not own_of or any(len(values[one].values) != own_of[one].shape[1] for one in own_of):
            return None
        held = torch.cat([values[name].values for name in own_of])
        own = torch.cat([*own_of.values()], dim=1)
        found = self._mix(rank, held, own)
        return None if found is None else Mix(found)

    def _mix(self, rank: int, held: Tensor, own: Tensor) -> Tensor | None:
        if not bool(held.isfinite().all()) or not bool(own.isfinite().all()):
            return None
        if not bool(held.any()):
            return torch.zeros(len(own), dtype=torch.float64)
        for chosen in self._likely(rank):
            factor = factor_between(chosen @ own, held, self.tolerance) if len(held) > 1 else None
            if factor is not None:
                return factor * chosen
        if len(held) < len(own) + SPARE:
            return None
        scale = own.norm(dim=1)
        used = scale > 0
        if not bool(used.any()):
            return None
        matrix = (own[used] / scale[used, None]).T
        solved = torch.linalg.lstsq(matrix, held, rcond=1e-10, driver="gelsd")
        if int(solved.rank) < matrix.shape[1]:
            return None
        if float((held - matrix @ solved.solution).norm()) > self.tolerance * float(held.norm()):
            return None
        weights = torch.zeros(len(own), dtype=torch.float64)
        weights[used] = solved.solution / scale[used]
        return weights

    def _likely(self, rank: int) -> Iterator[Tensor]:
        """Sets of pieces that gradients are often the sum of, the likeliest first."""
        ranks, numbers = torch.tensor(self.ranks), torch.tensor(self.numbers)
        sets = [torch.ones(len(ranks), dtype=torch.bool), ranks == rank]
        sets += [torch.isin(ranks, torch.tensor(group)) for group in self.groups]
        sets += [ranks == other for other in sorted(set(self.ranks) - {rank})]
        for one in sets:
            yield one.double()
        for last in sorted(set(self.numbers)):
            for one in sets[:2]:
                yield (one & (numbers <= last)).double()
                yield (one & (numbers == last)).double()


# A mixture of the ranks' own gradients, in words.

MOST_RANKS_NAMED = 6
OWN = "the rank's own gradient"


def mix_text(mix: Mix | None, pieces: Pieces, rank: int | None = None) -> str:
    """The mixture as a noun phrase: ``the mean of the ranks' own gradients``. ``rank``: the one
    that holds it.
    """
    if mix is None:
        return "no weighted sum of the ranks' own gradients"
    most = float(mix.weights.abs().max()) if len(mix.weights) else 0.0
    if not most:
        return "zero"
    weight = mix.uniform
    world_size = pieces.view.world_size
    if weight is not None and world_size == 1:
        return f"{text_of(weight, '.4g')} times what backward computed"
    if weight is not None:
        return f"{of_all_ranks(weight, world_size)} of the ranks' own gradients"
    by_rank: dict[int, set[float]] = {}
    for piece, one in zip(pieces.all, mix.weights.tolist(), strict=True):
        by_rank.setdefault(piece.rank, set()).add(0.0 if abs(one) <= SAME_WEIGHT * most else one)
    flat = {
        rank: weights.pop() if max(weights) - min(weights) <= SAME_WEIGHT * most else None
        for rank, weights in by_rank.items()
    }
    if None in flat.values():
        return "a weighted sum of the own gradients in which backward passes count differently"
    counted = [rank for rank, one in flat.items() if one]
    values = [one for one in flat.values() if one]
    if max(values) - min(values) <= SAME_WEIGHT * most:
        times = "" if abs(values[0] - 1) <= SAME_WEIGHT else f"{text_of(values[0], '.4g')} times "
        if counted == [rank]:
            return f"{times}{OWN}"
        what = "the own gradient" if len(counted) == 1 else "the sum of the own gradients"
        return f"{times}{what} of {ranked(counted, world_size)}"
    shown = [
        f"rank {rank} {text_of(one or 0.0, '.4g')}"
        for rank, one in list(flat.items())[:MOST_RANKS_NAMED]
    ]
    more = ", ..." if len(flat) > MOST_RANKS_NAMED else ""
    return f"a weighted sum of the own gradients with these weights: {', '.join(shown)}{more}"


def of_all_ranks(weight: float, world_size: int) -> str:
    """What all ranks' gradients are together if each has this weight: ``the mean``."""
    for value, what in ((1 / world_size, "mean"), (1.0, "sum")):
        if abs(weight - value) <= SAME_WEIGHT * value:
            return f"the {what}"
    return f"{text_of(weight, '.4g')} times the sum"


# The way of each gradient through a step.


@dataclass(frozen=True)
class AfterCall:
    """Some gradients of a rank as they were after one call.

    ``index``: the number of the call among all of the rank. ``mix``: None if the gradients are no
    mixture of what the ranks computed.
    """

    call: Call
    index: int
    mix: Mix | None


@dataclass(frozen=True)
class Path:
    """The states of parameters that went the same way on one rank.

    ``held``: what the step left in the end. ``as_left``: the last state's gradient is what was
    compared with the big batch; False if the step returned other tensors.
    """

    rank: int
    names: tuple[str, ...]
    states: tuple[AfterCall, ...]
    held: Mix | None
    as_left: bool

    @property
    def lines(self) -> tuple[tuple[CodeLine | None, Kind], ...]:
        """The line and kind of each state."""
        return tuple((line_of(one.call), one.call.kind) for one in self.states)


Values = list[tuple[int, Call, Kept]]
"""A gradient after each call that changed it: (number of the call, call, elements)."""


def line_of(call: Call) -> CodeLine | None:
    """The line of the user's code that made a call."""
    return call.users_line or call.line


def paths_of(pieces: Pieces) -> tuple[Path, ...]:
    """The ways of all gradients on all ranks that report; () if they were not recorded."""
    view = pieces.view
    observed = view.observed.by_rank
    if not pieces.all or any(not seen.trace.states for seen in observed.values()):
        return ()
    each = {seen.trace.each for seen in observed.values()}
    if len(each) != 1 or not all(seen.trace.complete for seen in observed.values()):
        return ()
    groups = {
        call.collective.ranks
        for rank in observed
        for call in view.observed.calls.of(rank)
        if call.collective is not None
    }
    kept, scale = each.pop(), view.setting.scale
    mixtures = Mixtures(
        own={
            name: torch.stack([thinned(one.gradient[place] / scale, kept) for one in pieces.all])
            for name, place in view.parameters.places.items()
        },
        ranks=tuple(one.rank for one in pieces.all),
        numbers=tuple(one.number for one in pieces.all),
        tolerance=pieces.tolerance,
        groups=tuple(sorted(groups)),
    )
    found: list[Path] = []
    for position, rank in enumerate(view.setting.reporting_ranks):
        held = {
            name: Kept(thinned(view.measured.by_rank[position][place] / scale, kept))
            for name, place in view.parameters.places.items()
        }
        known = {name for state in observed[rank].trace.states for name in state.values}
        found += _paths_of_rank(rank, _values_of(pieces, rank), held, mixtures, known)
    return tuple(found)


def _values_of(pieces: Pieces, rank: int) -> dict[str, Values]:
    """Parameter -> the values of its gradient, without those that changed nothing."""
    seen = pieces.view.observed.by_rank[rank]
    found: dict[str, Values] = {name: [] for name in pieces.view.parameters.names}
    last: dict[str, bytes] = {}
    for state in seen.trace.states:
        call = seen.calls[state.call]
        for name, packed in state.values.items():
            if call.step != pieces.view.setting.step or name not in found:
                continue
            if last.get(name, b"") == packed or _is_not_filled_yet(call):
                continue
            last[name] = packed
            if found[name] and found[name][-1][0] == state.call:
                found[name].pop()
            found[name].append((state.call, call, _kept(state, name)))
    return found


def _kept(state: GradientState, name: str) -> Kept:
    numbers = state.numbers.get(name)
    values = unpacked(state.values[name])
    return Kept(values, None if numbers is None else unpacked(numbers).long())


def _is_not_filled_yet(call: Call) -> bool:
    """True if the call only made room for a gradient, whose memory holds what was there before."""
    line = line_of(call)
    place = None if line is None or not call.rewrites else place_at(line)
    made = None if place is None else place.value
    return isinstance(made, ast.Call) and called_name(made) in UNWRITTEN


def _paths_of_rank(
    rank: int,
    values: Mapping[str, Values],
    held: Mapping[str, Kept],
    mixtures: Mixtures,
    known: Collection[str],
) -> Iterator[Path]:
    """``known``: the parameters whose gradients could be read in the second run."""
    alike: dict[object, list[str]] = {}
    for name, of_name in values.items():
        way = tuple((line_of(call), call.kind) for _, call, _ in of_name)
        alike.setdefault(way, []).append(name)
    for names in alike.values():
        path = _path(rank, names, values, held, mixtures, known)
        if path.held is not None and all(one.mix is not None for one in path.states):
            yield path
            continue
        # Something is no mixture, perhaps because it is another one for each parameter.
        singles = [_path(rank, [name], values, held, mixtures, known) for name in names]
        yield from _joined(singles)


def _path(
    rank: int,
    names: Sequence[str],
    values: Mapping[str, Values],
    held: Mapping[str, Kept],
    mixtures: Mixtures,
    known: Collection[str],
) -> Path:
    states = []
    for number, (index, call, _) in enumerate(values[names[0]]):
        at = {name: values[name][number][2] for name in names}
        at = {
            name: kept if len(kept.values) else Kept(0 * mixtures.own[name][0])
            for name, kept in at.items()
        }
        states.append(AfterCall(call, index, mixtures.of(rank, at)))
    nothing = Kept(torch.empty(0))
    last = {name: values[name][-1][2] if values[name] else nothing for name in names}
    as_left = all(
        name not in known or _equal(last[name], held[name], mixtures.tolerance) for name in names
    )
    mix = mixtures.of(rank, {name: held[name] for name in names})
    return Path(rank, tuple(names), tuple(states), mix, as_left)


def _equal(kept: Kept, whole: Kept, tolerance: float) -> bool:
    left = kept.values
    held = whole.values if kept.numbers is None else whole.values[kept.numbers]
    if not len(left):
        return not bool(held.any())
    if len(left) != len(held):
        return False
    if not bool(held.isfinite().all()):
        return torch.allclose(left, held, rtol=tolerance, atol=0.0, equal_nan=True)
    return float((left - held).norm()) <= tolerance * float(held.norm())


def _joined(paths: Sequence[Path]) -> Iterator[Path]:
    """The paths of single parameters, with those that are equal put together."""
    left = list(paths)
    while left:
        first = left.pop(0)
        same = [one for one in left if went_alike(first, one)]
        left = [one for one in left if one not in same]
        names = (*first.names, *(name for one in same for name in one.names))
        yield Path(first.rank, names, first.states, first.held, first.as_left)


def went_alike(one: Path, other: Path) -> bool:
    """True if two paths on one rank have the same lines, and the same mixtures there."""
    if one.rank != other.rank or one.lines != other.lines:
        return False
    mixes = [(a.mix, b.mix) for a, b in zip(one.states, other.states, strict=True)]
    return one.as_left == other.as_left and all(
        same_mix(a, b) for a, b in [*mixes, (one.held, other.held)]
    )


def same_mix(one: Mix | None, other: Mix | None) -> bool:
    """True if two mixtures have the same weights, or if neither is one."""
    if one is None or other is None:
        return one is other
    most = max(float(one.weights.abs().max()), float(other.weights.abs().max()))
    return float((one.weights - other.weights).abs().max()) <= SAME_WEIGHT * most


# What a call did to gradients, in words, and as a line to point at.


def done_text(call: Call, pieces: Pieces) -> str:
    """The effect of a call on gradients, as a clause: ``they are ...``."""
    if call.kind is Kind.BACKWARD:
        return "a backward pass ran"
    if call.collective is not None:
        operation = f" with {call.collective.reduce_op}" if call.collective.reduce_op else ""
        return f"{call.collective.op}{operation} over {_group(call, pieces)}"
    change = call.change
    if change is None:
        return f"{call.kind.value} changed them"
    if change.cleared:
        return "they were cleared"
    if change.factor is not None and abs(change.factor - 1) <= SAME_FACTOR:
        return "they were changed, by little"
    if change.factor is not None:
        return f"they were multiplied by {text_of(change.factor, '.6g')}"
    return "other numbers were written to the gradients"


def _group(call: Call, pieces: Pieces) -> str:
    assert call.collective is not None
    if len(call.collective.ranks) == pieces.view.world_size:
        return "all ranks"
    return ranked(call.collective.ranks, pieces.view.world_size)


def pointed(state: AfterCall, note: str, is_fault: bool = False) -> PointedLine | None:
    """The line of a state; None if it is not known."""
    return at(line_of(state.call), note, is_fault)


def at(
    line: CodeLine | None, note: str, is_fault: bool = False, missing: str = ""
) -> PointedLine | None:
    """The line, if it is known."""
    return None if line is None else PointedLine(line, note, is_fault, missing)


def backward_begins(line: CodeLine) -> PointedLine:
    """The line as one of which nothing else is told."""
    return PointedLine(line, "backward begins", begins_backward=True)


def lines_of_the_loss(
    backward: Call | None, note: str, is_fault: bool, of_backward: str = ""
) -> list[PointedLine | None]:
    """The line that made the loss at which a backward pass began, and that of the pass.

    ``of_backward``: what is told of the latter, which is the fault if the former is not known.
    """
    if backward is None:
        return []
    made, line = at(backward.made_at, note, is_fault), line_of(backward)
    if of_backward:
        return [made, at(line, of_backward, is_fault and made is None)]
    return [made, None if line is None else backward_begins(line)]


# The lines of the user's code that only some ranks ran.


def lines_only_on(observed: Mapping[int, Observation], ranks: Sequence[int]) -> list[PointedLine]:
    """The first line that exactly these ranks ran, or exactly the others; [] if there is none.

    All steps count, and lines of the forward and the backward pass too.
    """
    world_size = len(observed)
    if len(ranks) in (0, world_size):
        return []
    others = tuple(rank for rank in observed if rank not in ranks)
    run: dict[CodeLine, list[int]] = {}
    order: dict[CodeLine, int] = {}
    for rank, seen in sorted(observed.items()):
        for number, line in enumerate(seen.trace.lines_run or {}):
            run.setdefault(line, []).append(rank)
            order.setdefault(line, number)
    found = [line for line, by in run.items() if tuple(by) in (tuple(ranks), others)]
    if not found:
        return []
    # Up to the first line that not all ranks run, all of them have run the same lines.
    first = min(found, key=lambda line: order[line])
    who = ranked(run[first], world_size)
    note = f"only {who} {'runs' if len(run[first]) == 1 else 'run'} this line"
    return [PointedLine(first, note, True)]


def odd_ranks(values: Mapping[int, float]) -> tuple[int, ...]:
    """The ranks whose values are not those of most; () if most ranks have no common value."""
    most = max(map(abs, values.values()), default=0.0)
    near = {
        rank: [other for other, value in values.items() if abs(value - one) <= SAME_WEIGHT * most]
        for rank, one in values.items()
    }
    common = max(near.values(), key=len, default=[])
    if len(common) * 2 <= len(values):
        return ()
    return tuple(rank for rank in values if rank not in common)
