"""Tells that a script's loss depends on rows together, where ranks and reduction are right.

Then no average over ranks is the gradient of one process: negatives of a contrastive loss, a ratio
of norms, a statistic of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import mul

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.lines.loss_lines import line_of_loss
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.observed_scripts.as_case import OWN, ObservedStep
from ddp_equivalence.observed_scripts.gradient_sums import (
    distance,
    holds_the_mean_of_own,
    left_over,
    rounding_of,
)
from ddp_equivalence.observed_scripts.places import Place
from ddp_equivalence.observed_scripts.running_script import CannotReplay

NAME = "statistic_not_additive"

CERTAIN = 5
"""So many times the rounding must the big batch's gradient leave unexplained."""


def rows_depend_on_each_other(step: ObservedStep, view: View | None) -> Iterator[Finding]:
    """The finding, if every rank computes what its rows give alone, the ranks hold the mean of
    that, and the gradient of all rows is no mixture of these gradients. ``view``: of the step.
    """
    if any(step.record.step(rank, step.number).batch_norm for rank in _ranks(step)):
        return
    try:
        alone = [step.computed_alone(step.rows_by_rank[rank]) for rank in _ranks(step)]
        together = step.computed_alone(step.everything)
        is_additive = is_loss_additive(step)
    except CannotReplay:
        return
    most = rounding_of(together)
    own = [step.gradients(rank, OWN) for rank in _ranks(step)]
    if any(
        distance([(1.0, mine), (-1.0, its)]) > most for mine, its in zip(own, alone, strict=True)
    ):
        return
    if not holds_the_mean_of_own(step):
        return
    left = left_over(together, alone)
    if left <= CERTAIN * most or is_additive:
        return
    yield Finding(
        cause=NAME,
        sentence="The loss depends on the rows of a batch together, as with negatives, a ratio of "
        "norms or a statistic of the batch, and every rank has only its own rows. The ranks "
        "compute and average rightly; no average over ranks is the gradient of one process",
        look_at="what the loss compares or divides by: gather it from all ranks, with its gradient",
        accepted=True,
        headline="the loss depends on rows together, and a rank has only its own",
        because="each rank computes what its rows give alone, and their average is right, but "
        f"{text_of(left, '.2g')} of the big batch's gradient is no mixture of these",
        fix="none, if that is meant; else gather from all ranks what the loss compares.",
        lines=_lines(step, view),
    )


def is_loss_additive(step: ObservedStep) -> bool:
    """True if the loss of all rows is the mean of the ranks' losses, by their numbers of rows.

    Raises CannotReplay.
    """
    rows = [step.rows_by_rank[rank] for rank in _ranks(step)]
    of_ranks = [sum(step.answer(of_rank).losses) for of_rank in rows]
    counts = [len(of_rank) for of_rank in rows]
    mean = sum(map(mul, of_ranks, counts)) / sum(counts)
    loss = sum(step.answer(step.everything).losses)
    return bool(abs(loss - mean) <= NEGLIGIBLE * abs(mean))


def _lines(step: ObservedStep, view: View | None) -> tuple[PointedLine, ...]:
    """The line that made the loss; if that is not known, the one that called backward."""
    note = "the loss of this rank's rows alone"
    made = line_of_loss(view, note, is_fault=True) if view is not None else None
    recorded = step.record.step(0, step.number)
    place = recorded.backward_at[-1] if recorded.backward_at else Place()
    if made is not None or not place.file:
        return (made,) if made is not None else ()
    line = CodeLine(place.file, place.number, place.function)
    return (PointedLine(line, f"begins at {note}", is_fault=True),)


def _ranks(step: ObservedStep) -> range:
    return range(step.record.world_size)
