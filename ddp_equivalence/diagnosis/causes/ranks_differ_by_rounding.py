"""Every rank holds the big batch's gradient up to rounding, and each rounds it differently."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def lines(view: View) -> Sequence[PointedLine]:
    """The last line that exchanged or changed gradients."""
    places = view.observed.calls.places(Kind.COLLECTIVE, Kind.CHANGE)
    note = "after this line the ranks hold other bits"
    return [place.pointed(note, is_fault=True) for place in places[-1:]]


def fix(view: View) -> str:
    """Let one rank's result count, or add up in one order."""
    return "add up in the same order on all ranks, or broadcast the result from one rank."


HYPOTHESIS = Hypothesis(
    name="ranks_differ_by_rounding",
    sentence="Every rank holds the big batch's gradient up to rounding, but the ranks round it "
    "differently, so that their weights drift apart step by step.",
    look_at="the order in which each rank adds up what it receives (in a ring, every rank begins "
    "with another part)",
    headline="the ranks round differently",
    lines=lines,
    fix=fix,
)
