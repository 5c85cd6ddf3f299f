"""One cause, and a factor besides that all gradients have in common and that no cause explains."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.diagnosis.examples_read import is_divided_up
from ddp_equivalence.diagnosis.finding import Finding, finding_without_prediction
from ddp_equivalence.diagnosis.indications import common_loss_factor
from ddp_equivalence.diagnosis.limits_by_parameter import LimitByName
from ddp_equivalence.diagnosis.ranking import without_rounding
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.two_causes import ScaledPrediction, scaled_predictions
from ddp_equivalence.diagnosis.view import View

ONE = 1e-4
"""A factor is one if it differs by less."""


def one_cause_and_a_factor(
    view: View, most_unexplained: float, limits: LimitByName
) -> list[Finding]:
    """Every cause that explains all but one positive factor. Raises OutOfTime.

    If the cause itself only multiplies the right gradient, or if the ranks may have reduced wrong
    gradients as they should, the factor must be that of the losses at which backward was seen to
    begin: any number would be explained otherwise. It must then be nearer to 1 than both are
    together: losses that are divided by a count of all ranks begin at 1 / world size of their own
    mean, and to sum their gradients is right, so that not the sum is wrong, but the count.
    """
    findings: dict[str, Finding] = {}
    of_losses, own_with_a_factor = _factor_of_losses(view), _holds_own_with_a_factor(view)
    for scaled in scaled_predictions(view, most_unexplained, limits):
        if scaled.factor <= 0 or _is(scaled.factor, 1.0):
            continue
        anything_fits = _is_multiple_of_right(view, scaled.prediction.by_rank) or own_with_a_factor
        seen = of_losses is not None and _is(of_losses, scaled.factor)
        is_likely = seen and _is_the_lesser(scaled, view)
        if (anything_fits or scaled.is_a_right_step) and not is_likely:
            continue
        finding = finding_without_prediction(scaled.hypothesis)
        indication = scaled.hypothesis.indication(view)
        findings.setdefault(
            finding.cause,
            replace(
                finding,
                unexplained=without_rounding(scaled.residual),
                fits=True,
                detail=scaled.prediction.detail,
                because=indication.because if indication else "",
                fitted=True,
                besides=scaled.factor,
            ),
        )
    return list(findings.values())


def _is_the_lesser(scaled: ScaledPrediction, view: View) -> bool:
    """True unless the cause and the factor together multiply the right gradient by a number that is
    as near to 1 as the factor.
    """
    right, held = view.expected_by_rank, scaled.factor * scaled.prediction.by_rank
    square = float((right * right).sum())
    together = float((held * right).sum()) / square if square > 0 else 0.0
    return together <= 0 or abs(math.log(scaled.factor)) < abs(math.log(together))


def with_factor_of_own_gradients(findings: tuple[Finding, ...], view: View) -> tuple[Finding, ...]:
    """The findings; those that were predicted from what the ranks were seen to compute get the
    factor that all of this has beside what their rows give. Raises OutOfTime.
    """
    if not any(one.accepted for one in findings):
        return findings
    if is_divided_up(view) is False:
        return findings  # what is read twice, or not at all, has other counts
    factor = _factor_of_own_gradients(view)
    if factor is None or _is_multiple_of_right(view, view.measured.by_rank):
        return findings
    return tuple(
        replace(one, besides=factor) if _is_left_by(one, view, factor) else one for one in findings
    )


def _is_left_by(finding: Finding, view: View, factor: float) -> bool:
    """True if a prediction of this cause fits only once it is multiplied by the factor."""
    if not finding.accepted or finding.more or finding.fitted:
        return False
    named = (one for one in HYPOTHESES if one.name == finding.cause)
    predictions = [one for hypothesis in named for one in hypothesis.predict(view)]
    return any(nearly_equal(view.measured.by_rank, factor * one.by_rank) for one in predictions)


def _factor_of_own_gradients(view: View) -> float | None:
    """What all own gradients are multiplied by, as seen; None if that is 1, or not the same."""
    contributions, count = view.parts.contributions(), view.parts.micro_batches_per_rank
    if view.observed_gradients is None or contributions is None or not view.local_gradients:
        return None
    if view.parts.add_up_to_the_big_batch:
        if count is None:
            return None
        contributions = count * contributions
    local = view.local_gradients[0]
    square = float((contributions * contributions).sum())
    if not square > 0:
        return None
    factor = float((local * contributions).sum()) / square
    if _is(factor, 1.0) or factor <= 0 or not nearly_equal(local, factor * contributions):
        return None
    return factor


def _factor_of_losses(view: View) -> float | None:
    """By what the losses of a window, taken together, are multiplied; None if that is 1."""
    common = common_loss_factor(view)
    if common is None or view.parts.add_up_to_the_big_batch:
        return None
    counts = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    factor = common * counts.pop() if len(counts) == 1 else 1.0
    return None if _is(factor, 1.0) else factor


def _holds_own_with_a_factor(view: View) -> bool:
    """True if all ranks hold a multiple of the mean of what they computed, right or wrong."""
    held = view.measured.by_rank
    for local in view.local_gradients:
        own = view.on_every_rank(local.mean(0))
        square = float((own * own).sum())
        if square > 0 and nearly_equal(held, float((held * own).sum()) / square * own):
            return True
    return False


def _is_multiple_of_right(view: View, by_rank: Tensor) -> bool:
    square = float((view.expected_by_rank * view.expected_by_rank).sum())
    product = float((by_rank * view.expected_by_rank).sum())
    return square > 0 and nearly_equal(by_rank, product / square * view.expected_by_rank)


def _is(factor: float, other: float) -> bool:
    return abs(factor - other) <= ONE * abs(other)
