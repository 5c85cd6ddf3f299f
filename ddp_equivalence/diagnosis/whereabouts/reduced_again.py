"""Gradients that were already reduced among ranks are added up among the same ranks once more."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.whereabouts.gradient_mix import SAME_WEIGHT, Mix
from ddp_equivalence.diagnosis.whereabouts.gradient_path import Path, line_of
from ddp_equivalence.diagnosis.whereabouts.mix_text import mix_text
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.station_text import at, done_text
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named
from ddp_equivalence.measurement.calls import CollectiveCall, Contents


def reduced_again(pieces: Pieces, path: Path, paths: Sequence[Path]) -> Whereabouts | None:
    """None unless two ranks of a group both held a gradient that they then added up."""
    for number, station in enumerate(path.stations):
        collective = station.call.collective
        if number == 0 or collective is None or not _adds(collective):
            continue
        if not _held_twice(_before(path, paths, number, collective.ranks)):
            continue
        times = _times(pieces, path)
        line = line_of(station.call)
        earlier = [
            at(line_of(one.call), "reduces them before")
            for one in path.stations[:number]
            if one.call.collective is not None and line_of(one.call) != line
        ]
        if times < 2 and not earlier:  # gradients of zero are any mixture
            continue
        note = f"reduces the gradient{'s' if len(path.names) > 1 else ''} of {named(path.names)} "
        note += f"{times} times" if not earlier else "again"
        here = mix_text(path.stations[number - 1].mix, pieces)
        there = mix_text(station.mix, pieces)
        return Whereabouts(
            "reduction",
            "gradients are reduced more than once",
            f"Ranks added up gradients that already held each other's: they were {here}. Then "
            f"{done_text(station.call, pieces)}, and they were {there}.",
            distinct([*earlier[-1:], at(line, note, is_fault=True)]),
            fix="reduce each gradient once, after the last backward pass that adds to it.",
        )
    return None


def _adds(collective: CollectiveCall) -> bool:
    return collective.reduce_op == "SUM" and collective.contents is Contents.GRADIENTS


def _before(
    path: Path, paths: Sequence[Path], number: int, ranks: Sequence[int]
) -> list[Mix | None]:
    """What each rank of a group held of the path's first parameter before a station."""
    name = path.names[0]
    return [
        one.stations[number - 1].mix
        for one in paths
        if name in one.names and one.rank in ranks and number <= len(one.stations)
    ]


def _held_twice(mixes: Sequence[Mix | None]) -> bool:
    """True if two of these mixtures contain the gradient of the same backward pass."""
    held = [
        one.weights.abs() > SAME_WEIGHT * one.weights.abs().max()
        for one in mixes
        if one is not None and not one.of
    ]
    if len(held) != len(mixes) or len(held) < 2:
        return False
    return any(sum(bool(one[piece]) for one in held) > 1 for piece in range(len(held[0])))


def _times(pieces: Pieces, path: Path) -> int:
    """How often the path's rank added up its first gradient with others."""
    return sum(
        call.collective is not None
        and _adds(call.collective)
        and path.names[0] in call.collective.names
        for call in pieces.view.observed.calls.of(path.rank)
    )
