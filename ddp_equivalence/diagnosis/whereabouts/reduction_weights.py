"""Gradients are a mixture of what the ranks computed, with other weights than they should have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.lines_around_reduction import (
    lines_of_hook_divisors,
    lines_of_no_sync,
)
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.gradient_mix import SAME_WEIGHT, Mix
from ddp_equivalence.diagnosis.whereabouts.gradient_path import Path, Station, line_of
from ddp_equivalence.diagnosis.whereabouts.mix_text import mix_text
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.rank_lines import lines_only_on, odd_ranks
from ddp_equivalence.diagnosis.whereabouts.station_text import done_text, hooks, pointed
from ddp_equivalence.diagnosis.whereabouts.unequal_passes import least_weight
from ddp_equivalence.diagnosis.whereabouts.whereabouts import MOST_RANKS, Whereabouts, distinct
from ddp_equivalence.measurement.calls import Kind

NOTHING = 1e-9
"""Gradients that are so many times what they should be are zero."""


@dataclass(frozen=True)
class Wanted:
    """``weight``: of each piece in what every rank should hold; None if any will do that is the
    same for all.
    """

    weight: float | None

    def is_met(self, mix: Mix | None) -> bool:
        """True if the gradients are of this mixture."""
        weight = None if mix is None or mix.of else mix.uniform
        if not weight:
            return False
        return self.weight is None or abs(weight - self.weight) <= SAME_WEIGHT * abs(self.weight)


def later_pieces_stay(pieces: Pieces, path: Path) -> Whereabouts | None:
    """Gradients of some backward passes were reduced, and those of others stayed on their rank."""
    if path.held is None or not any(piece.number for piece in pieces.all):
        return None
    most = float(path.held.weights.abs().max()) if len(path.held.weights) else 0.0
    shared: set[int] = set()
    local: set[int] = set()
    every: set[int] = set()
    for piece, weight in zip(pieces.all, path.held.weights.tolist(), strict=True):
        every.add(piece.number)
        if abs(weight) > least_weight(pieces, most):
            (local if piece.rank == path.rank else shared).add(piece.number)
    local -= shared
    lost = every - shared - local
    if not shared or not (local or lost):
        return None
    text = f"Of {len(every)} backward passes of a rank, {_numbers(shared)} reached other ranks"
    text += f", {_numbers(local)} stayed on the rank itself" if local else ""
    text += f", {_numbers(lost)} left nothing" if lost else ""
    reduced = [one for one in path.stations if _is_shared(pieces, path, one)]
    later = [
        one
        for one in path.stations
        if one.call.kind is Kind.BACKWARD and one.call.backwards in _calls_of(pieces, path, local)
    ]
    cleared = [
        one
        for one in path.stations[:-1]
        if lost and one.mix is not None and not bool(one.mix.weights.any())
    ]
    return Whereabouts(
        "reduction",
        "not every backward pass is reduced",
        f"{text}.",
        distinct(
            [
                *(pointed(one, "clears them in between", is_fault=True) for one in cleared[:1]),
                *lines_of_no_sync(pieces.view),
                *(pointed(one, _reduces_note(one, pieces), is_fault=True) for one in reduced[:1]),
                *(pointed(one, "this backward pass stays on its rank") for one in later[:1]),
            ]
        ),
        fix="reduce once, in or after the last backward pass."
        if local
        else "clear the gradients once, before the first backward pass.",
    )


def _calls_of(pieces: Pieces, path: Path, numbers: set[int]) -> set[int]:
    return {
        piece.call.backwards
        for piece in pieces.by_rank[path.rank]
        if piece.call is not None and piece.number in numbers
    }


def _numbers(numbers: set[int]) -> str:
    return "number " + ", ".join(str(one + 1) for one in sorted(numbers))


def _is_shared(pieces: Pieces, path: Path, station: Station) -> bool:
    """True if what other ranks computed is in the gradients by now."""
    if station.mix is None:
        return False
    most = float(station.mix.weights.abs().max())
    return any(
        piece.rank != path.rank and abs(weight) > SAME_WEIGHT * most
        for piece, weight in zip(pieces.all, station.mix.weights.tolist(), strict=True)
    )


def _reduces_note(station: Station, pieces: Pieces) -> str:
    if station.call.kind is Kind.BACKWARD:
        return "gradients are reduced in this backward pass"
    return done_text(station.call, pieces)


def another_factor(
    pieces: Pieces, path: Path, good: Path | None, wanted: Wanted
) -> Whereabouts | None:
    """All ranks count equally, with a wrong weight."""
    weight = None if path.held is None or path.held.of else path.held.uniform
    right = wanted.weight
    if right is None and good is not None and good.held is not None:
        right = good.held.uniform
    if weight is None or not right:
        return None
    if good is None:
        changes = [one for one in path.stations if one.call.change is not None]
        reduced = [one for one in path.stations if _is_shared(pieces, path, one)]
        lines = [
            pointed(one, done_text(one.call, pieces), is_fault=True)
            for one in (changes or reduced)[-2:]
        ]
        if not changes:
            lines = [*_hook_lines(pieces), *lines]
    else:
        lines = _where_they_part(pieces, path, good)
    headline = "all ranks count equally, with a wrong factor"
    times = text_of(weight / right, ".4g")
    sentence = f"All ranks count equally, with {times} times the right weight."
    if abs(weight / right) < NOTHING:
        headline = "gradients are zero in the end"
        sentence = "These gradients are zero in the end, and were not before."
    return Whereabouts("reduction", headline, sentence, distinct(lines))


def _hook_lines(pieces: Pieces) -> list[PointedLine]:
    """The last communication hook, with what it multiplies or divides by."""
    places = pieces.view.observed.calls.places(Kind.HOOK)[-1:]
    return [
        line
        for place in places
        for line in (
            *lines_of_hook_divisors(pieces.view, place),
            PointedLine(place.first.made_at or place.line, "this hook ran in backward"),
        )
    ]


def _where_they_part(pieces: Pieces, path: Path, good: Path) -> list[PointedLine | None]:
    """The first line at which wrong gradients part from right ones."""
    if path.rank != good.rank:
        return _where_ranks_part(pieces, path, good)
    for here, there in zip(path.stations, good.stations, strict=False):
        if line_of(here.call) != line_of(there.call):
            break
        if not _similar(here.mix, there.mix):
            text = f"{done_text(here.call, pieces)}; other gradients: {mix_text(there.mix, pieces)}"
            return [
                *hooks(pieces, path, here),
                pointed(here, f"{text}; these: {mix_text(here.mix, pieces)}", is_fault=True),
            ]
    mine = {line for line, _ in path.lines}
    theirs = {line for line, _ in good.lines}
    lines: list[PointedLine | None] = [
        pointed(one, f"{done_text(one.call, pieces)}; other gradients are not changed here", True)
        for one in path.stations
        if line_of(one.call) not in theirs
    ]
    lines += [
        pointed(one, "changes other gradients, and not these", is_fault=True)
        for one in good.stations
        if line_of(one.call) not in mine
    ]
    return lines


def _where_ranks_part(pieces: Pieces, path: Path, good: Path) -> list[PointedLine | None]:
    """The lines that changed the gradients on a rank that holds right ones, or on one that does
    not, and not on the other one.
    """
    theirs = {line for line, _ in good.lines}
    mine = {line for line, _ in path.lines}
    lines = [
        pointed(one, f"changes them on rank {good.rank}, and not on rank {path.rank}", True)
        for one in good.stations
        if line_of(one.call) not in mine
    ]
    lines += [
        pointed(one, f"on rank {path.rank} now {mix_text(one.mix, pieces)}", not lines)
        for one in path.stations
        if line_of(one.call) not in theirs
    ]
    return lines


def _similar(one: Mix | None, other: Mix | None) -> bool:
    if one is None or other is None:
        return one is other
    most = max(float(one.weights.abs().max()), float(other.weights.abs().max()))
    return float((one.weights - other.weights).abs().max()) <= SAME_WEIGHT * most


def other_weights(pieces: Pieces, path: Path, paths: Sequence[Path]) -> Whereabouts:
    """Each rank counts with another weight."""
    text = mix_text(path.held, pieces)
    lines: list[PointedLine | None] = []
    odd: tuple[int, ...] = ()
    others = [one for one in paths if set(one.names) & set(path.names)]
    for number, station in enumerate(path.stations):
        own = {
            one.rank: weight
            for one in others
            if number < len(one.stations)
            and (weight := _own_weight(pieces, one, one.stations[number])) is not None
        }
        values = own.values()
        if not own or max(values) - min(values) <= SAME_WEIGHT * max(map(abs, values)):
            continue
        odd = odd_ranks(own)
        shown = ", ".join(
            f"rank {rank} {text_of(one, '.4g')}" for rank, one in list(own.items())[:MOST_RANKS]
        )
        lines = [
            *lines_only_on(pieces.view.observed.by_rank, odd),
            *hooks(pieces, path, station),
            pointed(station, f"now times the own gradient: {shown}", is_fault=True),
        ]
        break
    lines += [pointed(one, f"now {mix_text(one.mix, pieces)}") for one in path.stations[-1:]]
    return Whereabouts(
        "reduction",
        "the ranks do not count equally",
        f"In the end they are {text}.",
        distinct(lines),
        ranks=odd,
    )


def _own_weight(pieces: Pieces, path: Path, station: Station) -> float | None:
    """The weight of the rank's own first piece."""
    if station.mix is None:
        return None
    for piece, weight in zip(pieces.all, station.mix.weights.tolist(), strict=True):
        if piece.rank == path.rank:
            return float(weight)
    return None
