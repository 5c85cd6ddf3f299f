"""Gradients were reduced to one rank, and only others of them were sent back from there."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.lines.lines_around_reduction import lines_that_left_out
from ddp_equivalence.diagnosis.whereabouts.gradient_path import Path, Station, line_of
from ddp_equivalence.diagnosis.whereabouts.mix_text import mix_text
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.station_text import pointed
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named
from ddp_equivalence.measurement.calls import Kind

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
