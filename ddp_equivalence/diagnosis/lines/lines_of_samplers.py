"""Samplers of torch that were given another number of ranks, or another rank, than they run on."""

from __future__ import annotations

from ddp_equivalence.diagnosis.indications import ranks_by_number
from ddp_equivalence.diagnosis.lines.given_to import given_to_class, sole_origin
from ddp_equivalence.diagnosis.lines.lines_that_read import replicas_of, samplers
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View

SAMPLER = "DistributedSampler"
ARGUMENTS = ("dataset", "num_replicas", "rank")


def lines_of_wrong_samplers(view: View) -> list[PointedLine]:
    """The line that made a sampler with a wrong number of ranks, or with one rank on several, and
    the line that made this number.
    """
    found: list[PointedLine] = []
    for place in samplers(view):
        replicas = replicas_of(place)
        argument, note = "", ""
        if replicas and replicas != view.world_size:
            argument = "num_replicas"
            note = f"num_replicas={replicas}; there are {view.world_size} ranks"
        elif _ranks_with_one_sampler(place):
            argument = "rank"
            note = f"gets the same rank on {ranks_by_number(_ranks_with_one_sampler(place))}"
        if argument:
            found += _lines_that_gave(view, place, argument)
            found.append(place.pointed(note, is_fault=True))
    return found


def _ranks_with_one_sampler(place: Place) -> list[int]:
    """The first ranks whose samplers were made with the same arguments; [] if there are none."""
    by_text: dict[str, list[int]] = {}
    for rank, calls in sorted(place.by_rank.items()):
        by_text.setdefault(calls[-1].what, []).append(rank)
    return next((ranks for ranks in by_text.values() if len(ranks) > 1), [])


def _lines_that_gave(view: View, place: Place, argument: str) -> list[PointedLine]:
    run = run_lines(view, place.ranks[0])
    origins = [
        sole_origin(run, bound) for bound in given_to_class(run, SAMPLER, ARGUMENTS, argument)
    ]
    lines = [one[0].line(one[1]) for one in origins if one is not None]
    return [
        PointedLine(line, f"gives {argument}", True) for line in lines[:1] if line != place.line
    ]
