"""Ranks that give different gradients to one and the same collective."""

from __future__ import annotations

from collections import Counter

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import reduces_gradients
from ddp_equivalence.diagnosis.whereabouts.gradient_path import Path, line_of
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.rank_lines import lines_only_on
from ddp_equivalence.diagnosis.whereabouts.station_text import at
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named, ranked
from ddp_equivalence.measurement.calls import Call


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
