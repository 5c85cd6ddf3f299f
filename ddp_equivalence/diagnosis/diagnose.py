"""Rank the explanations by how much of the measured gradients each leaves unexplained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf

import torch

from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.digits import in_order
from ddp_equivalence.diagnosis.causes import HYPOTHESES, ranks_differ_by_rounding
from ddp_equivalence.diagnosis.finding import (
    Finding,
    finding_from_observation,
    finding_without_prediction,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction, WrongFactor
from ddp_equivalence.diagnosis.limits_by_parameter import (
    LimitByName,
    explains_every_parameter,
    limits_by_name,
)
from ddp_equivalence.diagnosis.pointing import pointed
from ddp_equivalence.diagnosis.ranking import LEAST_ACCEPTED, ROUNDING, ranked, without_rounding
from ddp_equivalence.diagnosis.remaining_factor import (
    one_cause_and_a_factor,
    with_factor_of_own_gradients,
)
from ddp_equivalence.diagnosis.residual import nearly_equal, unexplained
from ddp_equivalence.diagnosis.time_left import (
    CAUSES,
    OBSERVED_CAUSES,
    TWO_CAUSES,
    OutOfTime,
)
from ddp_equivalence.diagnosis.two_causes import two_causes_at_once
from ddp_equivalence.diagnosis.view import View

MOST_ACCEPTED = 0.3
"""An explanation that leaves more unexplained is never accepted, however coarse the precision."""

MOST_OF_DIFFERENCE = 0.5
"""An explanation must explain at least half of the difference, however small that is."""


def diagnose(view: View, comparison: Comparison, in_part: bool = False) -> tuple[Finding, ...]:
    """All explanations of what the ranks were measured to hold, the best first.

    A cause that makes the gradients meaningless comes first. If there is none, one cause whose
    prediction fits is believed; else two causes that fit together, or one that fits up to a factor;
    else a cause that was only observed.

    ``in_part``: if there is no time for some causes, note this in the view and return the findings
    of the others. Otherwise OutOfTime is raised.
    """
    invalidating = _causes_that_invalidate_gradients(view)
    if invalidating:
        return pointed(invalidating, view)
    most_unexplained, limits = _most_unexplained(view, comparison), limits_by_name(comparison)
    findings: list[Finding] = []
    tried = 0
    for hypothesis in HYPOTHESES:
        # Without time for one cause's gradients there may still be time for another's.
        with _noting_lack_of_time(view, CAUSES, in_part):
            view.time.require()
            if in_part:
                view.time.show(f"{tried} of {len(HYPOTHESES)} causes")
            finding = _compared_with_predictions(hypothesis, view, most_unexplained, limits)
            findings += [] if finding is None else [finding]
            tried += 1
    if tried < len(HYPOTHESES):
        view.time.leave_out(CAUSES, f"{tried} of {len(HYPOTHESES)} tried")
    if not any(finding.explains for finding in findings):
        with _noting_lack_of_time(view, TWO_CAUSES, in_part):
            findings += two_causes_at_once(
                view, most_unexplained, limits
            ) or one_cause_and_a_factor(view, most_unexplained, limits)
    if not any(finding.explains for finding in findings):
        with _noting_lack_of_time(view, OBSERVED_CAUSES, in_part):
            believed = _observed_cause(view)
            if believed is not None:
                findings = [one for one in findings if one.cause != believed.cause] + [believed]
    if not any(finding.explains for finding in findings) and _only_round_differently(
        view, comparison
    ):
        seen = "on every rank the error is within the limit, and the bits differ between ranks"
        findings.append(finding_from_observation(ranks_differ_by_rounding.HYPOTHESIS, seen))
    ordered = ranked(findings, view.setting.dtype)
    with _noting_lack_of_time(view, TWO_CAUSES, in_part):
        ordered = with_factor_of_own_gradients(ordered, view)
    return pointed(ordered, view)


@contextmanager
def _noting_lack_of_time(view: View, part: str, in_part: bool) -> Iterator[None]:
    """Note that there was no time for this part, if the block runs out of time and ``in_part``."""
    try:
        yield
    except OutOfTime:
        if not in_part:
            raise
        view.time.leave_out(part)


def _causes_that_invalidate_gradients(view: View) -> tuple[Finding, ...]:
    return tuple(
        replace(finding_from_observation(hypothesis, indication.because), accepted=True)
        for hypothesis in HYPOTHESES
        if hypothesis.invalidates_gradients
        and (indication := hypothesis.indication(view)) is not None
        and indication.supports
    )


def _most_unexplained(view: View, comparison: Comparison) -> float:
    """The largest part of the measurement that an explanation may leave unexplained.

    It follows from the limit that all parameters have together, as if they were one vector.
    """
    limits = math.hypot(*(parameter.limit.absolute for parameter in comparison.parameters))
    norms = math.hypot(*(parameter.norm for parameter in comparison.parameters))
    limit = limits / norms if norms > 0 else 0.0
    difference = unexplained(view.measured.by_rank, view.expected_by_rank)
    most = max(LEAST_ACCEPTED, min(4 * limit, MOST_ACCEPTED))
    return min(most, MOST_OF_DIFFERENCE * difference)


def _compared_with_predictions(
    hypothesis: Hypothesis, view: View, most_unexplained: float, limits: LimitByName
) -> Finding | None:
    """The best of the hypothesis's predictions; None if it predicts nothing on this case."""
    predictions = [*hypothesis.predict(view), *_multiples(hypothesis.factors(view), view)]
    if not predictions:
        return None
    residuals = [unexplained(view.measured.by_rank, one.by_rank) for one in predictions]
    fitting = [
        number
        for number, residual in enumerate(residuals)
        if residual <= most_unexplained
        and explains_every_parameter(view, predictions[number].by_rank, limits)
    ]
    if fitting:  # the others are set aside, also if they leave less of all elements together
        predictions = [predictions[number] for number in fitting]
        residuals = [residuals[number] for number in fitting]
    best = _index_of_best(predictions, residuals, most_unexplained)
    would_show = any(not nearly_equal(one.by_rank, view.expected_by_rank) for one in predictions)
    residual = without_rounding(residuals[best])
    indication = hypothesis.indication(view)
    return replace(
        finding_without_prediction(hypothesis),
        unexplained=residual,
        would_show=would_show,
        fits=would_show and bool(fitting),
        detail=predictions[best].detail,
        fitted=predictions[best].fitted,
        because=indication.because if indication else "",
        refuted=indication is not None and not indication.supports,
    )


def _index_of_best(
    predictions: Sequence[Prediction], residuals: Sequence[float], most_unexplained: float
) -> int:
    """The index of the prediction with the smallest residual; of several, the first.

    A fitted prediction is chosen only if no prediction fits that is not fitted.
    """
    free = [number for number, prediction in enumerate(predictions) if not prediction.fitted]
    if min((residuals[number] for number in free), default=inf) > most_unexplained:
        free = list(range(len(predictions)))
    return min(free, key=lambda number: in_order(without_rounding(residuals[number])))


def _multiples(factors: Sequence[WrongFactor], view: View) -> Iterator[Prediction]:
    """The big batch times each factor, on all parameters or only on those that differ."""
    for factor in factors:
        multiple = view.on_every_rank(factor.value * view.expected)
        yield Prediction(multiple, factor.detail)
        if view.measured.only_some_parameters_differ:
            partly = view.parameters.combined(
                multiple, view.expected_by_rank, view.measured.differing
            )
            yield Prediction(partly, f"{factor.detail}, for some parameters only")


def _only_round_differently(view: View, comparison: Comparison) -> bool:
    """True if all ranks are right, and differ from each other by nothing but rounding."""
    if not comparison.only_bits_differ:
        return False
    spread = view.measured.by_rank - view.measured.by_rank[0]
    most = ROUNDING * torch.finfo(view.setting.dtype).eps * float(view.expected.norm())
    return float(spread.norm(dim=1).max()) <= most


def _observed_cause(view: View) -> Finding | None:
    """The first cause for which an observation alone is conclusive."""
    for hypothesis in HYPOTHESES:
        indication = hypothesis.indication(view)
        if indication is not None and indication.supports and indication.conclusive:
            return finding_from_observation(hypothesis, indication.because)
    return None
