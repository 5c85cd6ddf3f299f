"""The explanations of a difference, once the big batch draws the numbers that the ranks drew."""

from __future__ import annotations

from dataclasses import replace

from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.causes import (
    dropout_differs_from_reference,
    dropout_same_on_all_ranks,
)
from ddp_equivalence.diagnosis.diagnose import diagnose
from ddp_equivalence.diagnosis.drawn_numbers import DrawnView
from ddp_equivalence.diagnosis.finding import Finding, finding_from_observation
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.ranking import without_rounding
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.measurement.request import Request

MOST_LINES = 2

SEEN = (
    "from its rows and the numbers that it drew, each rank's own gradient was computed again, and "
    "the big batch with these numbers gives what the ranks hold"
)


def right_but_for_draws(
    request: Request, drawn: DrawnView | None, comparison: Comparison
) -> Comparison | None:
    """The comparison with a big batch that draws the ranks' numbers, if a user's own step is right
    with them; None if it is not, if all ranks were given the same seed, or if the model is so large
    that only some of its elements are kept.
    """
    one_step = request.step_count == 1 and not request.trains
    if drawn is None or not (request.is_the_users_own and one_step):
        return None
    if not drawn.view.parameters.sample.is_whole:
        return None
    if dropout_differs_from_reference.step_set_the_same_seed(drawn.view):
        return None  # the rows of two ranks are to draw other numbers
    with_numbers = drawn.compared(comparison)
    return with_numbers if with_numbers.same else None


def findings_of_drawn(drawn: DrawnView, comparison: Comparison) -> tuple[Finding, ...]:
    """The random numbers alone, if nothing else differs; otherwise the causes of what differs."""
    if not drawn.nothing_else_differs:
        return diagnose(drawn.view, comparison, in_part=True)
    view, because = drawn.view, SEEN
    hypothesis = dropout_differs_from_reference.HYPOTHESIS
    if dropout_differs_from_reference.step_set_the_same_seed(view):
        hypothesis = dropout_same_on_all_ranks.HYPOTHESIS
        because = f"the step set the same seed on all ranks before its forward pass; {SEEN}"
    lines = tuple(hypothesis.lines(view))
    if not lines:
        lines = tuple(
            PointedLine(line, "rank 0 drew here", is_fault=True)
            for line in drawn.lines_of_rank_0[:MOST_LINES]
        )
    left = unexplained(view.measured.by_rank, view.expected_by_rank)
    finding = replace(
        finding_from_observation(hypothesis, because),
        accepted=True,
        unexplained=without_rounding(left),
        lines=lines,
        fix=hypothesis.fix(view),
    )
    return (finding,)
