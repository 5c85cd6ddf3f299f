"""All ranks count equally, but the backward passes of each rank do not."""

from __future__ import annotations

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.whereabouts.gradient_mix import SAME_WEIGHT
from ddp_equivalence.diagnosis.whereabouts.gradient_path import Path, Station
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.station_text import done_text, pointed
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct
from ddp_equivalence.measurement.calls import Kind

ROUNDING = 10.0
"""A weight that is so many times the tolerance of a fit, relative to the largest, is not zero."""

MOST_PASSES = 4


def least_weight(pieces: Pieces, most: float) -> float:
    """A piece with a smaller weight is not in a mixture whose largest weight is ``most``."""
    return min(ROUNDING * pieces.tolerance, SAME_WEIGHT) * most


def passes_count_unequally(pieces: Pieces, path: Path) -> Whereabouts | None:
    """Says how often each backward pass counts; None if they count alike, or ranks do not."""
    weights = _by_pass(pieces, path)
    if weights is None:
        return None
    most = max(map(abs, weights))
    if not most or max(weights) - min(weights) <= SAME_WEIGHT * most:
        return None
    largest = max(range(len(weights)), key=lambda number: abs(weights[number]))
    shown = [
        f"{number + 1} counts {text_of(weight / weights[largest], '.3g')} times"
        for number, weight in enumerate(weights)
        if abs(weight / weights[largest] - 1) > SAME_WEIGHT
    ]
    more = " and so on," if len(shown) > MOST_PASSES else ""
    text = f"Of {len(weights)} backward passes of a rank, number "
    text += ", number ".join(shown[:MOST_PASSES]) + more
    lines = [
        pointed(one, f"{done_text(one.call, pieces)}; pass {shown[0]}", True)
        for one in _changes_between(path)
    ]
    return Whereabouts(
        "reduction",
        "the backward passes do not count equally",
        f"{text} as often as number {largest + 1}.",
        distinct(lines),
        fix="change gradients once, after the last backward pass." if lines else "",
    )


def _by_pass(pieces: Pieces, path: Path) -> list[float] | None:
    """The weight of each backward pass; None if a pass counts differently on the ranks."""
    if path.held is None or path.held.of or not any(one.number for one in pieces.all):
        return None
    most = float(path.held.weights.abs().max())
    found: dict[int, list[float]] = {}
    for piece, weight in zip(pieces.all, path.held.weights.tolist(), strict=True):
        found.setdefault(piece.number, []).append(weight)
    if any(max(one) - min(one) > least_weight(pieces, most) for one in found.values()):
        return None
    return [sum(one) / len(one) for _, one in sorted(found.items())]


def _changes_between(path: Path) -> list[Station]:
    """The changes of gradients after the first backward pass and before the last one."""
    passes = [n for n, one in enumerate(path.stations) if one.call.kind is Kind.BACKWARD]
    if len(passes) < 2:
        return []
    between = path.stations[passes[0] + 1 : passes[-1]]
    return [one for one in between if one.call.kind is not Kind.BACKWARD]
