"""Tells that a script's loss depends on rows together, where ranks and reduction are right.

Then no average over ranks is the gradient of one process: negatives of a contrastive loss, a ratio
of norms, a statistic of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.lines.loss_lines import line_of_loss
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.observed_scripts.as_case import BEFORE_CLIP, OWN, ObservedStep
from ddp_equivalence.observed_scripts.oracle import CannotReplay
from ddp_equivalence.observed_scripts.recorded_step import Place

NAME = "statistic_not_additive"

ROUNDING = 1e-6
"""What may be off in float64, relative to the norm. In a lower precision: """
ROUNDING_IN_LOW_PRECISION = 1e-3

CERTAIN = 5
"""So many times the rounding must the big batch's gradient leave unexplained."""

Gradients = Mapping[str, Tensor | None]


def rows_depend_on_each_other(step: ObservedStep, view: View | None) -> Iterator[Finding]:
    """The finding, if every rank computes what its rows give alone, the ranks hold the mean of
    that, and the gradient of all rows is no mixture of these gradients. ``view``: of the step.
    """
    if any(step.record.step(rank, step.number).batch_norm for rank in _ranks(step)):
        return
    try:
        alone = [_alone(step, step.rows_by_rank[rank]) for rank in _ranks(step)]
        together = _alone(step, step.everything)
    except CannotReplay:
        return
    in_float64 = all(g.dtype is torch.float64 for g in together.values() if g is not None)
    most = ROUNDING if in_float64 else ROUNDING_IN_LOW_PRECISION
    own = [step.gradients(rank, OWN) for rank in _ranks(step)]
    if any(
        _distance([(1.0, mine), (-1.0, its)]) > most for mine, its in zip(own, alone, strict=True)
    ):
        return
    weight = -1.0 / len(own)
    for rank in _ranks(step):
        held = step.gradients(rank, BEFORE_CLIP)
        if _distance([(1.0, held), *((weight, mine) for mine in own)]) > most:
            return
    left = _left_over(together, alone)
    if left <= CERTAIN * most:
        return
    yield Finding(
        cause=NAME,
        sentence="The loss depends on the rows of a batch together, as with negatives, a ratio of "
        "norms or a statistic of the batch, and every rank has only its own rows. The ranks "
        "compute and average rightly; no average over ranks is the gradient of one process",
        look_at="what the loss compares or divides by: gather it from all ranks, with its gradient",
        unexplained=None,
        accepted=True,
        headline="the loss depends on rows together, and a rank has only its own",
        because="each rank computes what its rows give alone, and their average is right, but "
        f"{text_of(left, '.2g')} of the big batch's gradient is no mixture of these",
        fix="none, if that is meant; else gather from all ranks what the loss compares.",
        lines=_lines(step, view),
    )


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


def _alone(step: ObservedStep, rows: tuple[int, ...]) -> dict[str, Tensor | None]:
    found = step.answer(rows).gradients(BEFORE_CLIP)
    return {step.short(name): gradient for name, gradient in found.items()}


def _distance(terms: list[tuple[float, Gradients]]) -> float:
    """The norm of the weighted sum, relative to that of the first term."""
    square = norm = 0.0
    for name in dict.fromkeys(name for _, gradients in terms for name in gradients):
        weighted = [
            weight * one.double() for weight, of in terms if (one := of.get(name)) is not None
        ]
        if weighted:
            square += float(torch.stack(weighted).sum(0).square().sum())
        first = terms[0][1].get(name)
        norm += 0.0 if first is None else float(first.double().square().sum())
    return float((square / norm) ** 0.5) if norm else float(square > 0)


def _left_over(together: Gradients, parts: list[dict[str, Tensor | None]]) -> float:
    """What no mixture of the parts explains, relative to the norm of the whole."""
    all_of_them = [together, *parts]
    products = torch.zeros(len(all_of_them), len(all_of_them), dtype=torch.float64)
    for name in dict.fromkeys(name for one in all_of_them for name in one):
        gradients = [one.get(name) for one in all_of_them]
        shape = next((one.shape for one in gradients if one is not None), None)
        if shape is None:
            continue
        rows = torch.stack(
            [
                torch.zeros(shape, dtype=torch.float64) if one is None else one.double()
                for one in gradients
            ]
        ).reshape(len(gradients), -1)
        products += rows @ rows.T
    of_parts, with_whole = products[1:, 1:], products[1:, 0]
    weights = torch.linalg.lstsq(of_parts, with_whole.unsqueeze(1)).solution.squeeze(1)
    left = products[0, 0] - 2 * weights @ with_whole + weights @ of_parts @ weights
    return float((left.clamp(min=0) / products[0, 0]).sqrt()) if products[0, 0] > 0 else 0.0
