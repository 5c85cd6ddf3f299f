"""The lines between two backward passes that clear some gradients, and not those that need it."""

from __future__ import annotations

from ddp_equivalence.diagnosis.lines.lines_around_reduction import lines_that_left_out
from ddp_equivalence.diagnosis.lines.lines_between_backwards import lines_that_clear
from ddp_equivalence.diagnosis.lines.made_from import lines_behind
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def lines_of_partial_clears(view: View) -> list[PointedLine]:
    """The last such line, and what chose the gradients that it clears; [] if there is none.

    Gradients that differ were not cleared, while others were.
    """
    places = [place for place in lines_that_clear(view) if _cleared_by(place)]
    cleared = {name for place in places for name in _cleared_by(place)}
    left = sorted(view.measured.differing - cleared)
    if not places or not left or not view.measured.differing:
        return []
    place = places[-1]
    count, total = len(_cleared_by(place)), len(view.parameters.names)
    others = f" and {len(left) - 1} more" if len(left) > 1 else ""
    note = f"clears {count} of {total} gradients, not that of {left[0]}{others}"
    decided = lines_that_left_out(view, place)
    if not decided:
        run = run_lines(view, place.ranks[0])
        decided = lines_behind(run, place.line, 1)
    return [
        *(one for one in decided if one.line != place.line),
        place.pointed(note, is_fault=True),
    ]


def _cleared_by(place: Place) -> set[str]:
    """The gradients that were seen to be cleared at this place."""
    return {
        name
        for call in place.calls
        if call.kind is Kind.CHANGE and call.change is not None and call.change.cleared
        for name in call.change.names
    }
