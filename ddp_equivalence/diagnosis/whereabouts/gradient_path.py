"""The way of each gradient through a step: of whose gradients it is made after each call."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.of_reduction import lines_that_left_out
from ddp_equivalence.diagnosis.lines.source_tree import (
    SourceLine,
    called_name,
    functions_named,
    inside,
    place_of,
)
from ddp_equivalence.diagnosis.setting import PointedLine, reduces_gradients
from ddp_equivalence.diagnosis.whereabouts.gradient_mix import (
    Mix,
    Mixtures,
    lines_only_on,
    mix_text,
    mixtures_of,
)
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named, ranked
from ddp_equivalence.measurement.calls import (
    Call,
    CodeLine,
    Kind,
    LocalTensor,
    ModuleCall,
    distance_of,
    thinned,
    unpacked,
)
from ddp_equivalence.measurement.gradient_watch import SAME_FACTOR, factor_between
from ddp_equivalence.measurement.lines import MOST_KEPT


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


# Follows the tensors that the user's lines make of the ranks' own gradients, by their values.
#
# Every element is looked up among the sums of what some of the ranks computed for one element.

MOST_RANKS = 6
"""With more ranks there are too many sums."""

MOST_SUMS = 4_000_000

FEWEST = 4
"""So many elements of a tensor, at least, must be other than zero."""

ROUNDING = 64.0
"""Two numbers are equal if they differ by at most this many eps, relative to themselves."""

SMALLEST_TOLERANCE = 1e-10

SAME = 1e-9
"""A tensor is a multiple of another one if this much of it, at most, is something else."""

UNKNOWN = -1

FRESH = ("empty", "zeros", "ones", "full", "rand", "new_", "arange", "tensor", "normal")
"""What makes a tensor that does not depend on the values of others begins with one of these."""


@dataclass(frozen=True)
class Sums:
    """``values``: all sums, in ascending order, shape (sums,). ``masks``: of which ranks each is
    the sum, rank r as bit r. ``elements``: of which element of the gradients. ``tolerance``:
    relative.
    """

    values: Tensor
    masks: Tensor
    elements: Tensor
    tolerance: float

    def masks_of(self, sample: bytes) -> Tensor:
        """For each element that is not zero, the ranks that it is a sum of; ``UNKNOWN`` if none."""
        held = unpacked(sample)
        return self._looked_up(held[held != 0], self.masks)

    def elements_of(self, sample: bytes) -> Tensor:
        """For each element, the element of the gradients that it belongs to, or ``UNKNOWN``."""
        held = unpacked(sample)
        return torch.where(held != 0, self._looked_up(held, self.elements), UNKNOWN)

    def _looked_up(self, held: Tensor, of_sums: Tensor) -> Tensor:
        at = torch.searchsorted(self.values, held).clamp(max=len(self.values) - 1)
        found = torch.full_like(at, UNKNOWN)
        for near in (at, (at - 1).clamp(min=0)):
            equal = (self.values[near] - held).abs() <= self.tolerance * held.abs()
            found = torch.where(equal & (found == UNKNOWN), of_sums[near], found)
        return found


def sums_of(pieces: Pieces) -> Sums | None:
    """The sums of all sets of ranks, also divided by their number; None if not all is known."""
    view = pieces.view
    world_size, elements = pieces.own.shape
    sets = 2**world_size - 1
    if world_size < 2 or world_size > MOST_RANKS or 2 * sets * elements > MOST_SUMS:
        return None
    if view.parameters.total != view.parameters.whole_total:
        return None
    own = pieces.own.double() / view.setting.scale
    values, masks, places = [], [], []
    for mask in range(1, sets + 1):
        chosen = [rank for rank in range(world_size) if mask >> rank & 1]
        total = own[chosen].sum(0)
        for divisor in (1, world_size):
            values.append(total / divisor)
            masks.append(torch.full((elements,), mask))
            places.append(torch.arange(elements))
    order = torch.cat(values).argsort()
    eps = torch.finfo(view.setting.dtype).eps
    return Sums(
        torch.cat(values)[order],
        torch.cat(masks)[order],
        torch.cat(places)[order],
        max(SMALLEST_TOLERANCE, ROUNDING * eps),
    )


def line_of_other_values(pieces: Pieces, rank: int) -> list[PointedLine]:
    """The first line that made something else of gradients than their sums, in their order."""
    return line_that_mixes_up(pieces, rank) or line_that_reorders(pieces, rank)


def line_that_mixes_up(pieces: Pieces, rank: int) -> list[PointedLine]:
    """The first line that made, of sums of the ranks' gradients, a tensor that holds none."""
    for one, masks, sources in _followed(pieces, rank):
        unknown = masks == UNKNOWN
        is_none = len(masks) >= FEWEST and 2 * int(unknown.sum()) > len(masks)
        known = [name for name, of in sources if len(of) and not bool((of == UNKNOWN).any())]
        if is_none and known and len(known) == len(sources):
            what = one.name or "the result"
            note = f"{known[0]} holds gradients or their sums, {what} does not"
            return [PointedLine(one.line, note, True)]
    return []


def line_that_reorders(pieces: Pieces, rank: int) -> list[PointedLine]:
    """The first line that put elements in another order than a tensor of the same size had them."""
    sums, seen = sums_of(pieces), pieces.view.observed.by_rank.get(rank)
    if sums is None or seen is None:
        return []
    first: dict[int, tuple[str, Tensor]] = {}
    for one in seen.trace.local_tensors:
        if one.step != pieces.view.setting.step or one.elements < pieces.own.shape[1]:
            continue
        places = sums.elements_of(one.values)
        if 2 * int((places != UNKNOWN).sum()) < max(2 * FEWEST, len(places)):
            continue
        # Padding at the end leaves the elements where they are.
        name, before = first.setdefault(distance_of(one.elements, MOST_KEPT), (one.name, places))
        most = min(len(places), len(before))
        both = (places[:most] != UNKNOWN) & (before[:most] != UNKNOWN)
        alike = int((places[:most] == before[:most])[both].sum())
        if 2 * alike < int(both.sum()):
            what = one.name or "the result"
            note = f"{what} has the elements in another order than {name or 'before'}"
            return [PointedLine(one.line, note, True)]
    return []


def line_that_sums(pieces: Pieces, rank: int, ranks: Sequence[int]) -> list[PointedLine]:
    """The first line that made a tensor which holds the sums of just these ranks' gradients."""
    wanted = sum(1 << one for one in ranks)
    for one, masks, sources in _followed(pieces, rank):
        if len(masks) < FEWEST or not bool((masks == wanted).all()):
            continue
        if any(len(of) and bool((of == wanted).all()) for _, of in sources):
            continue
        what = one.name or "the result"
        who = ranked(ranks, pieces.view.world_size)
        return [PointedLine(one.line, f"{what} is made of {who} only", True)]
    return []


@dataclass(frozen=True)
class _Known:
    """The elements of a tensor, and of which ranks each that is not zero is a sum."""

    values: Tensor
    masks: Tensor


Sources = list[tuple[str, Tensor]]
"""Names that a line reads -> of which ranks their elements were sums."""


def _followed(pieces: Pieces, rank: int) -> Iterator[tuple[LocalTensor, Tensor, Sources]]:
    """The tensors that assignments and returns made on a rank, with those that they read."""
    sums = sums_of(pieces)
    seen = pieces.view.observed.by_rank.get(rank)
    if sums is None or seen is None:
        return
    latest: dict[tuple[str, str], _Known] = {}
    for one in seen.trace.local_tensors:
        if one.step != pieces.view.setting.step:
            continue
        masks = sums.masks_of(one.values)
        place = place_of(one.line.file, one.line.number)
        if place is not None and _makes(place, one.name):
            read = [
                (name, known)
                for name in _names_read(place)
                for (function, of), known in latest.items()
                if function == one.line.function and of.partition("[")[0] == name
            ]
            held = unpacked(one.values)
            for _, known in read:
                if _is_multiple(held, known.values):
                    masks = known.masks
            yield one, masks, [(name, known.masks) for name, known in read]
        latest[one.line.function, one.name] = _Known(unpacked(one.values), masks)


def _is_multiple(held: Tensor, of: Tensor) -> bool:
    """True if one tensor is a number times another one."""
    return len(held) == len(of) and factor_between(of, held, SAME) is not None


def _makes(place: SourceLine, name: str) -> bool:
    """True if the statement returns a tensor, or gives this name to one."""
    statement = place.statement
    value = getattr(statement, "value", None)
    calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)] if value else []
    if any(called_name(one).startswith(FRESH) for one in calls):
        return False
    if any(functions_named(place.file, called_name(one)) for one in calls):
        return False  # the lines of that function are followed themselves
    if isinstance(statement, ast.Return):
        return not name
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    return name.partition("[")[0] in [ast.unparse(one) for one in targets]


def _names_read(place: SourceLine) -> list[str]:
    """The variables, and attributes of ``self``, that a statement reads."""
    found: dict[str, None] = {}
    for node in inside(place.statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id != "self":
            found[node.id] = None
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            found[ast.unparse(node)] = None
    if isinstance(place.statement, ast.AugAssign):
        found[ast.unparse(place.statement.target)] = None
    return list(found)


# What a call did to gradients, in words, and as a line to point at.


def done_text(call: Call, pieces: Pieces) -> str:
    """What a call did to gradients, as a clause without an object: ``they are ...``."""
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
    return "they were changed, and not by a factor"


def _group(call: Call, pieces: Pieces) -> str:
    assert call.collective is not None
    if len(call.collective.ranks) == pieces.view.world_size:
        return "all ranks"
    return ranked(call.collective.ranks, pieces.view.world_size)


def pointed(station: Station, note: str, is_fault: bool = False) -> PointedLine | None:
    """The line of a station; None if it is not known."""
    return at(line_of(station.call), note, is_fault)


def at(
    line: CodeLine | None, note: str, is_fault: bool = False, missing: str = ""
) -> PointedLine | None:
    """The line, if it is known."""
    return None if line is None else PointedLine(line, note, is_fault, missing)


def hooks(pieces: Pieces, path: Path, station: Station | None) -> list[PointedLine]:
    """The last line that registered a hook on these gradients, if the station is a backward."""
    if station is None or station.call.kind is not Kind.BACKWARD:
        return []
    places = pieces.view.observed.calls.places(
        Kind.HOOK,
        Kind.TENSOR_HOOK,
        where=lambda call: not call.names or bool(set(call.names) & set(path.names)),
    )
    inside = pieces.view.observed.calls.places(
        Kind.COLLECTIVE,
        where=lambda call: call.in_backward and call.backwards == station.call.backwards + 1,
    )
    lines = [
        at(place.first.made_at or place.line, f"{place.first.what}: it ran in backward", True)
        for place in places[-1:]
    ]
    changes = pieces.view.observed.calls.changes(
        lambda call: (
            call.in_backward
            and call.change is not None
            and call.change.factor is not None
            and call.backwards == station.call.backwards + 1
            and bool(set(call.change.names) & set(path.names))
        )
    )
    lines += [
        at(place.line, f"{done_text(place.first, pieces)} in this hook", True)
        for place in changes[-1:]
        if place.line not in {line_of(station.call), *(one.line for one in lines if one)}
    ]
    lines += [place.pointed("a collective of this hook") for place in inside[-1:]]
    return [one for one in lines if one is not None]


def module_text(call: ModuleCall | None) -> str:
    """A module and its class, as text."""
    if call is None:
        return "the model"
    return f"{call.name} ({call.kind})" if call.name else f"the model ({call.kind})"


# Gradients were reduced to one rank, and only others of them were sent back from there.

SENDING = frozenset({"broadcast", "scatter", "all_gather", "all_gather_into_tensor"})


def not_sent_back(pieces: Pieces, path: Path, right: Sequence[Path]) -> Whereabouts | None:
    """None unless a later collective gave this rank right gradients, and not these ones.

    ``right``: the paths of all gradients that are right.
    """
    reduced = [one for one in path.stations if _op(one) == "reduce"]
    mine = {line for line, _ in path.lines}
    sent = [
        one
        for good in right
        for one in good.stations
        if good.rank == path.rank and _op(one) in SENDING and line_of(one.call) not in mine
    ]
    if not sent or not reduced:
        return None
    places = pieces.view.observed.calls.places(
        Kind.COLLECTIVE, where=lambda call: line_of(call) == line_of(sent[-1].call)
    )
    decided = [line for place in places[:1] for line in lines_that_left_out(pieces.view, place)]
    return Whereabouts(
        "reduction",
        "some gradients are not sent back",
        f"They were reduced to one rank, and rank {path.rank} did not get the result: there they "
        f"are {mix_text(path.held, pieces)}.",
        distinct(
            [
                pointed(reduced[-1], "reduces them to one rank"),
                *decided,
                pointed(sent[-1], f"gives other gradients, not {named(path.names)}", is_fault=True),
            ]
        ),
        fix="send every reduced gradient back to all ranks, or use all_reduce.",
    )


def _op(station: Station) -> str:
    collective = station.call.collective
    return "" if collective is None else collective.op


# Ranks that give different gradients to one and the same collective.


def unlike_calls(pieces: Pieces, path: Path) -> Whereabouts | None:
    """None unless a call that reduced these gradients met calls of others on other ranks."""
    for call in pieces.view.observed.calls.of(path.rank):
        collective = call.collective
        if collective is not None and reduces_gradients(call):
            found = _unlike(pieces, path, call, collective.ranks)
            if found is not None and set(collective.names) & set(path.names):
                return found
    return None


def _unlike(pieces: Pieces, path: Path, call: Call, group: tuple[int, ...]) -> Whereabouts | None:
    mine = _reductions(pieces, path.rank, group)
    place = next((number for number, one in enumerate(mine) if one is call), None)
    if place is None:
        return None
    met: dict[int, tuple[str, ...]] = {}
    for rank in group:
        calls = _reductions(pieces, rank, group)
        if len(calls) != len(mine) or calls[place].collective is None:
            return None
        met[rank] = calls[place].collective.names  # type: ignore[union-attr]
    if len(set(met.values())) == 1 or not all(met.values()):
        return None
    common = Counter(met.values()).most_common(1)[0][0]
    odd = tuple(rank for rank, names in met.items() if names != common)
    who, others = ranked(odd, pieces.view.world_size), "the others"
    what = f"{who} reduce{'s' if len(odd) == 1 else ''} {named(met[odd[0]])}"
    what += f" where {others} reduce {named(common)}"
    return Whereabouts(
        "reduction",
        "ranks reduce different gradients together",
        f"In one and the same collective, {what}.",
        distinct([*_only(pieces, odd), at(line_of(call), what, is_fault=True)]),
        ranks=odd,
        fix="reduce the gradients in the same order on all ranks.",
    )


def _only(pieces: Pieces, ranks: tuple[int, ...]) -> list[PointedLine]:
    return lines_only_on(pieces.view.observed.by_rank, ranks)


def _reductions(pieces: Pieces, rank: int, group: tuple[int, ...]) -> list[Call]:
    """The calls by which a rank reduces gradients in this group."""
    return [
        call
        for call in pieces.view.observed.calls.of(rank)
        if reduces_gradients(call)
        and call.collective is not None
        and call.collective.ranks == group
    ]
