"""The way of each gradient through a step: of whose gradients it is made after each call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.whereabouts.gradient_mix import Mix, Mixtures, mixtures_of
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind
from ddp_equivalence.measurement.trace import thinned, unpacked


@dataclass(frozen=True)
class Station:
    """What some gradients of a rank were after one call.

    ``index``: the number of the call among all of the rank. ``mix``: None if the gradients are no
    mixture of what the ranks computed.
    """

    call: Call
    index: int
    mix: Mix | None


@dataclass(frozen=True)
class Path:
    """The stations of parameters that went the same way on one rank.

    ``held``: what the step left in the end. ``as_left``: the last station's gradient is what was
    compared with the big batch; False if the step returned other tensors.
    """

    rank: int
    names: tuple[str, ...]
    stations: tuple[Station, ...]
    held: Mix | None
    as_left: bool

    @property
    def lines(self) -> tuple[tuple[CodeLine | None, Kind], ...]:
        """The line and kind of each station."""
        return tuple((line_of(one.call), one.call.kind) for one in self.stations)


Values = list[tuple[int, Call, Tensor]]
"""What one gradient held after each call that changed it: (number of the call, call, elements)."""


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
    kept = each.pop()
    mixtures = mixtures_of(pieces, kept, tuple(sorted(groups)))
    found: list[Path] = []
    for position, rank in enumerate(view.setting.reporting_ranks):
        held = {
            name: thinned(view.measured.by_rank[position][place] / view.setting.scale, kept)
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
            if last.get(name, b"") == packed:
                continue
            last[name] = packed
            if found[name] and found[name][-1][0] == state.call:
                found[name].pop()
            found[name].append((state.call, call, unpacked(packed)))
    return found


def _paths_of_rank(
    rank: int,
    values: Mapping[str, Values],
    held: Mapping[str, Tensor],
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
        if path.held is not None and all(one.mix is not None for one in path.stations):
            yield path
            continue
        # Something is no mixture, perhaps because it is another one for each parameter.
        singles = [_path(rank, [name], values, held, mixtures, known) for name in names]
        yield from _joined(singles)


def _path(
    rank: int,
    names: Sequence[str],
    values: Mapping[str, Values],
    held: Mapping[str, Tensor],
    mixtures: Mixtures,
    known: Collection[str],
) -> Path:
    stations = []
    for number, (index, call, _) in enumerate(values[names[0]]):
        at = {name: values[name][number][2] for name in names}
        at = {
            name: value if len(value) else 0 * mixtures.own[name][0] for name, value in at.items()
        }
        stations.append(Station(call, index, mixtures.of(rank, at)))
    last = {name: values[name][-1][2] if values[name] else torch.empty(0) for name in names}
    as_left = all(
        name not in known or _equal(last[name], held[name], mixtures.tolerance) for name in names
    )
    mix = mixtures.of(rank, {name: held[name] for name in names})
    return Path(rank, tuple(names), tuple(stations), mix, as_left)


def _equal(left: Tensor, held: Tensor, tolerance: float) -> bool:
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
        yield Path(first.rank, names, first.stations, first.held, first.as_left)


def went_alike(one: Path, other: Path) -> bool:
    """True if two paths on one rank have the same lines, and the same mixtures there."""
    if one.rank != other.rank or one.lines != other.lines:
        return False
    mixes = [(a.mix, b.mix) for a, b in zip(one.stations, other.stations, strict=True)]
    return one.as_left == other.as_left and all(
        _same_mix(a, b) for a, b in [*mixes, (one.held, other.held)]
    )


def _same_mix(one: Mix | None, other: Mix | None) -> bool:
    if one is None or other is None:
        return one is other
    if bool(one.of) or bool(other.of):
        return False
    most = max(float(one.weights.abs().max()), float(other.weights.abs().max()))
    return float((one.weights - other.weights).abs().max()) <= 1e-3 * most
