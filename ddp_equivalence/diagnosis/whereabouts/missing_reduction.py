"""Says why gradients hold what one rank, or some ranks, computed, and not what all did."""

from __future__ import annotations

from ddp_equivalence.diagnosis.lines.lines_around_reduction import (
    lines_of_exchange,
    lines_that_left_out,
)
from ddp_equivalence.diagnosis.lines.unreached import lines_that_keep_from_reducing
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place, reduces_gradients
from ddp_equivalence.diagnosis.whereabouts.followed_values import line_that_sums
from ddp_equivalence.diagnosis.whereabouts.gradient_path import Path, line_of
from ddp_equivalence.diagnosis.whereabouts.mix_text import mix_text
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.station_text import at
from ddp_equivalence.diagnosis.whereabouts.unequal_passes import least_weight
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named, ranked
from ddp_equivalence.measurement.calls import Call, Contents, Kind


def why_not_reduced(pieces: Pieces, path: Path, good: Path | None) -> Whereabouts | None:
    """Which ranks are missing, and which call lacks them; None if all ranks count."""
    if path.held is None or path.held.of or pieces.view.world_size == 1:
        return None
    most = float(path.held.weights.abs().max()) if len(path.held.weights) else 0.0
    counted = {
        piece.rank
        for piece, weight in zip(pieces.all, path.held.weights.tolist(), strict=True)
        if abs(weight) > least_weight(pieces, most)
    }
    missing = [rank for rank in range(pieces.view.world_size) if rank not in counted]
    if not missing or not counted:
        return None
    return (
        _fewer_calls(pieces, path)
        or _not_in_any(pieces, path, good)
        or _copy_not_written_back(pieces, path)
        or _other_group(pieces, path, missing)
        or _plain(pieces, path, good, counted)
    )


def _about(call: Call, path: Path) -> bool:
    collective = call.collective
    return (
        collective is not None
        and reduces_gradients(call)
        and bool(set(collective.names) & set(path.names))
    )


def _reductions_of(pieces: Pieces, path: Path, rank: int) -> list[Call]:
    return [call for call in pieces.view.observed.calls.of(rank) if _about(call, path)]


def _fewer_calls(pieces: Pieces, path: Path) -> Whereabouts | None:
    """The rank reduced these gradients less often than another one."""
    calls = pieces.view.observed.calls
    counts = {
        rank: len(_reductions_of(pieces, path, rank)) for rank in range(pieces.view.world_size)
    }
    few, many = min(counts.values()), max(counts.values())
    if few == many:
        return None
    ranks = [rank for rank, count in counts.items() if count == few]
    last = next((line_of(one) for one in reversed(calls.of(ranks[0])) if line_of(one)), None)
    there = next(rank for rank, count in counts.items() if count == many)
    line = next(line_of(one) for one in _reductions_of(pieces, path, there))
    who = ranked(ranks, pieces.view.world_size)
    return Whereabouts(
        "reduction",
        f"{who} took part in fewer reductions",
        f"{who[:1].upper()}{who[1:]} reduced them in {few} calls, and other ranks in up to {many}.",
        distinct(
            [
                at(last, f"the last recorded call of {who}", is_fault=True),
                *_group_without(pieces, _reductions_of(pieces, path, there)[0], ranks),
                at(line, f"reduces them, but not on {who}"),
            ]
        ),
        fix="make the same collectives on all ranks.",
    )


def _group_without(pieces: Pieces, call: Call, ranks: list[int]) -> list[PointedLine]:
    """The line that made the group of a collective, if it lacks these ranks."""
    if call.collective is None or set(ranks) & set(call.collective.ranks):
        return []
    group = set(call.collective.ranks)
    made = pieces.view.observed.calls.places(
        Kind.NEW_GROUP, where=lambda one: set(one.ranks) == group
    )
    who = ranked(ranks, pieces.view.world_size)
    return [one.pointed(f"makes a group without {who}", is_fault=True) for one in made[:1]]


def _not_in_any(pieces: Pieces, path: Path, good: Path | None) -> Whereabouts | None:
    """Other gradients were reduced by a line that did not contain these."""
    calls = pieces.view.observed.calls
    if good is None or _reductions_of(pieces, path, path.rank):
        return None
    reducing = [one for one in calls.reductions if path.rank in one.by_rank]
    if not reducing:
        return None
    place = reducing[-1]
    decided = lines_that_left_out(pieces.view, place)
    return Whereabouts(
        "reduction",
        "some gradients are in no reduction",
        f"No reduction contained them: they are {mix_text(path.held, pieces)}.",
        distinct(
            [
                *decided,
                place.pointed(f"reduces others, not {named(path.names)}", is_fault=True),
            ]
        ),
        fix="reduce these gradients too.",
    )


def _copy_not_written_back(pieces: Pieces, path: Path) -> Whereabouts | None:
    """A copy of these gradients was reduced, and .grad was not changed afterwards."""
    calls = pieces.view.observed.calls
    copies = [
        call
        for call in _reductions_of(pieces, path, path.rank)
        if call.collective is not None
        and call.collective.contents is Contents.COPIES_OF_GRADIENTS
        and not call.in_backward
    ]
    order = calls.of(path.rank)
    last = path.stations[-1].call if path.stations else None
    if not copies or (last is not None and order.index(last) > order.index(copies[-1])):
        return None
    line = line_of(copies[-1])
    return Whereabouts(
        "reduction",
        "the reduced copy is not written back",
        f"A copy of them was reduced, and .grad was not written afterwards: they are "
        f"{mix_text(path.held, pieces)}.",
        distinct([at(line, "reduces a copy", True, "copy the result back to .grad")]),
        fix="after this line, copy the reduced values back into each .grad.",
    )


def _other_group(pieces: Pieces, path: Path, missing: list[int]) -> Whereabouts | None:
    """The reductions were over some ranks only."""
    calls = [
        call
        for call in _reductions_of(pieces, path, path.rank)
        if call.collective is not None
        and len(call.collective.ranks) < pieces.view.world_size
        and not set(missing) <= set(call.collective.ranks)
    ]
    if not calls or calls[-1].collective is None:
        return None
    group = ranked(calls[-1].collective.ranks, pieces.view.world_size)
    made = pieces.view.observed.calls.places(
        Kind.NEW_GROUP,
        where=lambda call: set(call.ranks) == set(calls[-1].collective.ranks),  # type: ignore[union-attr]
    )
    return Whereabouts(
        "reduction",
        "gradients are reduced over some ranks only",
        f"They were reduced over {group}, and never with "
        f"{ranked(missing, pieces.view.world_size)}.",
        distinct(
            [
                *(one.pointed("makes the group") for one in made[:1]),
                at(line_of(calls[-1]), f"reduces over {group}", is_fault=True),
            ]
        ),
        fix=f"reduce over all {pieces.view.world_size} ranks.",
    )


def _plain(pieces: Pieces, path: Path, good: Path | None, counted: set[int]) -> Whereabouts:
    """What they hold in the end, and the last call before."""
    reduced = _reductions_of(pieces, path, path.rank)
    text = mix_text(path.held, pieces)
    stations = path.stations[-2:]
    sent = any(
        one.op == "send"
        for seen in pieces.view.observed.by_rank.values()
        for one in seen.collectives or ()
    )
    exchanged = lines_of_exchange(pieces.view, path.rank) if sent else []
    if not exchanged and not reduced and len(counted) > 1:
        exchanged = line_that_sums(pieces, path.rank, sorted(counted))
    lines: list[PointedLine | None] = [*exchanged]
    if not reduced and not exchanged:
        lines += lines_that_keep_from_reducing(pieces.view)
    lines += [
        at(
            line_of(one.call),
            f"after it: {mix_text(one.mix, pieces)}",
            is_fault=one is stations[-1] and not exchanged,
        )
        for one in stations
    ]
    others = [place for place in _elsewhere(pieces, path) if not reduced]
    lines += [one.pointed("a collective of something else") for one in others[-1:]]
    never = "" if reduced else "No collective that Python issued contained them. "
    if sent:
        never += "Ranks sent each other tensors point to point, which is not followed. "
    return Whereabouts(
        "reduction",
        "gradients of some ranks are missing",
        f"{never}In the end they are {text}.",
        distinct(lines),
        fix="" if reduced or sent else "reduce the gradients over all ranks after backward.",
    )


def _elsewhere(pieces: Pieces, path: Path) -> list[Place]:
    return pieces.view.observed.calls.places(
        Kind.COLLECTIVE, where=lambda call: not _about(call, path)
    )
