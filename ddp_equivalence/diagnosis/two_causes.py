"""Two causes at once: one predicts the gradient up to a factor, the other is that factor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.diagnosis.finding import Finding, finding_without_prediction
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction, WrongFactor
from ddp_equivalence.diagnosis.limits_by_parameter import LimitByName, explains_every_parameter
from ddp_equivalence.diagnosis.ranking import without_rounding
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, nearly_equal, unexplained
from ddp_equivalence.diagnosis.view import View

WHOLE = 1e-6
"""A divisor is a whole number if it is as near as this, relative to itself."""


@dataclass(frozen=True)
class ScaledPrediction:
    """A prediction that fits once it is multiplied by ``factor``, up to the ``residual``.

    ``is_a_right_step``: ranks that make neither mistake would hold the same.
    """

    hypothesis: Hypothesis
    prediction: Prediction
    factor: float
    residual: float
    is_a_right_step: bool


def two_causes_at_once(view: View, most_unexplained: float, limits: LimitByName) -> list[Finding]:
    """Every pair of causes that together leave at most this much unexplained.

    Raises OutOfTime.
    """
    findings: dict[tuple[str, ...], Finding] = {}
    for scaled in scaled_predictions(view, most_unexplained, limits):
        if scaled.is_a_right_step:
            continue
        for hypothesis, factor in _wrong_factors(view):
            agrees = abs(scaled.factor / factor.value - 1) <= max(NEGLIGIBLE, most_unexplained)
            if agrees and hypothesis.name != scaled.hypothesis.name:
                if _is_one_wrong_divisor(view, scaled):
                    continue
                finding = _finding(view, scaled, hypothesis, factor)
                findings.setdefault(finding.causes, finding)
    return list(findings.values())


def scaled_predictions(
    view: View, most_unexplained: float, limits: LimitByName
) -> Iterator[ScaledPrediction]:
    """The predictions that fit the measurement once they are multiplied by some factor."""
    for hypothesis in HYPOTHESES:
        view.time.require()
        if _is_refuted(view, hypothesis):
            continue
        for prediction in hypothesis.predict(view):
            if prediction.fitted or nearly_equal(prediction.by_rank, view.expected_by_rank):
                continue
            factor = _nearest_factor(view.measured.by_rank, prediction.by_rank)
            if factor is None:
                continue
            residual = unexplained(view.measured.by_rank, factor * prediction.by_rank)
            both = factor * prediction.by_rank
            if residual <= most_unexplained and explains_every_parameter(view, both, limits):
                cancel = _cancel_each_other(view, both)
                yield ScaledPrediction(hypothesis, prediction, factor, residual, cancel)


def _is_one_wrong_divisor(view: View, scaled: ScaledPrediction) -> bool:
    """True if dividing the sum over the ranks by one wrong number explains as much as two causes.

    So it is where both causes are factors, and nothing was observed of the first one.
    """
    both = scaled.factor * scaled.prediction.by_rank
    square = float((view.expected_by_rank * view.expected_by_rank).sum())
    factor = float((both * view.expected_by_rank).sum()) / square if square > 0 else 0.0
    if factor <= 0 or not nearly_equal(both, factor * view.expected_by_rank):
        return False
    indication = scaled.hypothesis.indication(view)
    divisor = view.world_size / factor
    return indication is None and abs(divisor - round(divisor)) < WHOLE * divisor


def _cancel_each_other(view: View, both: Tensor) -> bool:
    """True if the causes together leave what ranks hold that make neither mistake.

    That is the big batch, or what the ranks have computed themselves, however wrong, reduced as it
    should be. ``both``: what the causes together predict.
    """
    add_up = view.parts.add_up_to_the_big_batch
    own = (local.sum(0) if add_up else local.mean(0) for local in view.local_gradients)
    return any(nearly_equal(both, view.on_every_rank(one)) for one in (view.expected, *own))


def _wrong_factors(view: View) -> Iterator[tuple[Hypothesis, WrongFactor]]:
    for hypothesis in HYPOTHESES:
        if not _is_refuted(view, hypothesis):
            for factor in hypothesis.factors(view):
                yield hypothesis, factor


def _is_refuted(view: View, hypothesis: Hypothesis) -> bool:
    indication = hypothesis.indication(view)
    return indication is not None and not indication.supports


def _nearest_factor(measured: Tensor, predicted: Tensor) -> float | None:
    """The number k for which k times the prediction is nearest to the measurement."""
    square = float((predicted * predicted).sum())
    product = float((measured * predicted).sum())
    return product / square if square > 0 and product == product else None


def _finding(
    view: View, scaled: ScaledPrediction, second: Hypothesis, factor: WrongFactor
) -> Finding:
    first = scaled.hypothesis
    indication = first.indication(view)
    return replace(
        finding_without_prediction(first),
        unexplained=without_rounding(scaled.residual),
        fits=True,
        detail="; ".join(filter(None, (scaled.prediction.detail, factor.detail))),
        because=indication.because if indication else "",
        more=(finding_without_prediction(second),),
    )
