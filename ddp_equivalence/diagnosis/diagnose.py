"""Ranks the explanations by how much of the measured gradients each leaves unexplained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import hypot, inf, log
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.digits import in_order, text_of
from ddp_equivalence.diagnosis.causes import CAUSE_OF, HYPOTHESES
from ddp_equivalence.diagnosis.causes.losses import leaves_no_factor
from ddp_equivalence.diagnosis.examples_read import is_divided_up
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    LimitByName,
    Prediction,
    WrongFactor,
    common_loss_factor,
    explains_every_parameter,
    limits_by_name,
)
from ddp_equivalence.diagnosis.lines.of_reduction import lines_of_divisor
from ddp_equivalence.diagnosis.residual import (
    FITTED,
    NEGLIGIBLE,
    is_multiple,
    nearest_factor,
    nearly_equal,
    unexplained,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.time_left import CAUSES, OBSERVED_CAUSES, TWO_CAUSES
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.whereabouts import MOST_LINES

MOST_ACCEPTED = 0.3
"""An explanation that leaves more unexplained is never accepted, however coarse the precision."""

MOST_OF_DIFFERENCE = 0.5
"""An explanation must explain at least half of the difference, however small that is."""


def diagnose(view: View, comparison: Comparison) -> tuple[Finding, ...]:
    """All explanations of what the ranks were measured to hold, the best first.

    A cause that makes the gradients meaningless comes first. If there is none, one cause whose
    prediction fits is believed; else two causes that fit together, or one that fits up to a factor;
    else a cause that was only observed. What there is no time for is noted in the view.
    """
    invalidating = tuple(
        replace(finding_from_observation(hypothesis, indication.because), accepted=True)
        for hypothesis in HYPOTHESES
        if hypothesis.invalidates_gradients
        and (indication := hypothesis.indication(view)) is not None
        and indication.supports
    )
    if invalidating:
        return pointed(invalidating, view)
    most_unexplained, limits = _most_unexplained(view, comparison), limits_by_name(comparison)
    findings: list[Finding] = []
    tried = 0
    for hypothesis in HYPOTHESES:
        # Without time for one cause's gradients there may still be time for another's.
        with view.time.unless_out(CAUSES):
            view.time.require()
            view.time.show(f"{tried} of {len(HYPOTHESES)} causes")
            finding = _compared_with_predictions(hypothesis, view, most_unexplained, limits)
            findings += [] if finding is None else [finding]
            tried += 1
    if tried < len(HYPOTHESES):
        view.time.leave_out(CAUSES, f"{tried} of {len(HYPOTHESES)} tried")
    if not any(finding.explains for finding in findings):
        with view.time.unless_out(TWO_CAUSES):
            scaled = scaled_predictions(view, most_unexplained, limits)
            findings += two_causes_at_once(
                view, scaled, most_unexplained
            ) or one_cause_and_a_factor(view, scaled)
    if not any(finding.explains for finding in findings):
        with view.time.unless_out(OBSERVED_CAUSES):
            believed = _observed_cause(view)
            if believed is not None:
                findings = [one for one in findings if one.cause != believed.cause] + [believed]
    explained = any(finding.explains for finding in findings)
    if not explained and _only_round_differently(view, comparison):
        seen = "on every rank the error is within the limit, and the bits differ between ranks"
        findings.append(finding_from_observation(CAUSE_OF["ranks_differ_by_rounding"], seen))
    ordered = ranked(findings, view.setting.dtype)
    with view.time.unless_out(TWO_CAUSES):
        ordered = with_factor_of_own_gradients(ordered, view)
    return pointed(ordered, view)


def _most_unexplained(view: View, comparison: Comparison) -> float:
    """The largest part of the measurement that an explanation may leave unexplained.

    It follows from the limit that all parameters have together, as if they were one vector.
    """
    limits = hypot(*(parameter.limit.absolute for parameter in comparison.parameters))
    norms = hypot(*(parameter.norm for parameter in comparison.parameters))
    limit = limits / norms if norms > 0 else 0.0
    difference = unexplained(view.measured.by_rank, view.expected_by_rank)
    most = max(LEAST_ACCEPTED, min(4 * limit, MOST_ACCEPTED))
    return min(most, MOST_OF_DIFFERENCE * difference)


def _compared_with_predictions(
    hypothesis: Hypothesis, view: View, most_unexplained: float, limits: LimitByName
) -> Finding | None:
    """The best of the hypothesis's predictions; None if it predicts nothing on this case.

    A prediction that fits is better than all others, also if one of them leaves less of all
    elements together. Of those that fit, a fitted one is chosen only if no other one fits.
    """
    predictions = [*hypothesis.predict(view), *_multiples(hypothesis.factors(view), view)]
    if not predictions:
        return None
    would_show = any(not nearly_equal(one.by_rank, view.expected_by_rank) for one in predictions)
    tried = []
    for one in (_up_to_rounding(view, prediction) for prediction in predictions):
        residual = unexplained(view.measured.by_rank, one.by_rank)
        fits = residual <= most_unexplained and explains_every_parameter(view, one.by_rank, limits)
        tried.append((not fits, fits and one.fitted, without_rounding(residual), one))
    misfits, _, residual, best = min(tried, key=lambda one: (*one[:2], in_order(one[2])))
    indication = hypothesis.indication(view)
    return replace(
        finding_without_prediction(hypothesis),
        unexplained=residual,
        would_show=would_show,
        fits=would_show and not misfits,
        detail=best.detail,
        fitted=best.fitted,
        because=indication.because if indication else "",
        refuted=indication is not None and not indication.supports,
    )


def _up_to_rounding(view: View, predicted: Prediction) -> Prediction:
    """The prediction, with the measured values where the rounding of a reduction in half precision
    that was seen may have made them.
    """
    if view.rounding is None:
        return predicted
    measured, detail = view.measured.by_rank, "up to the rounding of a reduction in half precision"
    is_rounding = (measured - predicted.by_rank).abs() <= view.rounding
    return replace(
        predicted,
        by_rank=torch.where(is_rounding, measured, predicted.by_rank),
        detail="; ".join(filter(None, (predicted.detail, detail))),
    )


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


def seen_at_the_optimizer(view: View) -> tuple[Finding, ...]:
    """The cause that was seen where nothing can be predicted of an optimizer; () if none was."""
    for hypothesis in HYPOTHESES:
        indication = hypothesis.indication(view) if hypothesis.of_optimizer else None
        if indication is not None and indication.supports and indication.conclusive:
            found = finding_from_observation(hypothesis, indication.because)
            return tuple(_pointed(one, view) for one in ranked([found], view.setting.dtype))
    return ()


def pointed(findings: Iterable[Finding], view: View) -> tuple[Finding, ...]:
    """The findings; those that are believed get their lines and their fix. A fix that would leave a
    mistake says so, and one that would make right gradients wrong is none.
    """
    shares_out_else = view.setting.shards is None and view.observed.examples_read is None
    shown = []
    for one in findings:
        is_left = one.accepted and (_is_another_mean(view) or _is_of_another_mean(one, view))
        is_wrong = one.cause == SUM and _has_right_ones(view)
        if is_left and (shares_out_else or is_wrong):
            # Ranks that have parts of a layer, say, have a reason not to reduce; and where some
            # parameters have the right sum, to divide would make these wrong.
            shown.append(replace(one, accepted=False))
            continue
        found = _pointed(one, view) if one.accepted else one
        if is_left and found.fix:
            found = replace(found, fix=f"{found.fix} {ANOTHER_MISTAKE}", leaves_a_mistake=True)
        shown.append(found)
    return tuple(shown)


def _pointed(finding: Finding, view: View) -> Finding:
    hypothesis = CAUSE_OF.get(finding.cause)
    if hypothesis is None:
        return finding
    if hypothesis.guess and not hypothesis.seen(view):
        finding = _as_a_guess(finding, hypothesis.guess, view)
    more = tuple(_pointed(one, view) for one in finding.more)
    if leaves_no_factor(finding.cause, view):
        more = tuple(replace(one, fix="") for one in more)
    lines = _lines(hypothesis, view)
    return replace(finding, fix=hypothesis.fix(view), lines=lines, more=more)


def _as_a_guess(finding: Finding, guess: str, view: View) -> Finding:
    """The finding with what the gradients are, and no more, if they have but one factor."""
    places = view.parameters.positions_of(sorted(view.measured.differing))
    held, right = view.measured.by_rank[:, places], view.expected_by_rank[:, places]
    if not is_multiple(held, right):
        return replace(finding, is_guess=True)
    times = f"{text_of(nearest_factor(held, right) or 0.0, '.4g')} times what they should be"
    return replace(
        finding,
        sentence=f"Gradients are {times}. {guess} explains this, but none was seen.",
        headline=f"gradients are {times}",
        is_guess=True,
    )


ANOTHER_MISTAKE = "Their mean is not the big batch's either, so something else is wrong, too."

SUM = "sum_not_mean"
OF_A_MEAN = (SUM, "averaged_twice", "divided_by_local_world_size", "divided_by_wrong_number")
"""The causes that reduce what the ranks contribute otherwise than to their mean."""


def _has_right_ones(view: View) -> bool:
    """True if some parameters have the right gradient, and it is more than rounding of zero."""
    places = view.parameters.places.items()
    right = [place for name, place in places if name not in view.measured.differing]
    least = NEGLIGIBLE * float(view.expected.norm())
    return any(float(view.expected[place].norm()) > least for place in right)


def _is_of_another_mean(finding: Finding, view: View) -> bool:
    """True if the mean of what the ranks contribute is not the big batch's, and they hold another
    multiple of it.
    """
    contributions, held = view.parts.contributions(), view.measured.by_rank
    if finding.cause not in OF_A_MEAN or finding.more or contributions is None:
        return False
    mean = contributions.mean(0)
    return is_multiple(held, mean.expand_as(held)) and not is_multiple(mean, view.expected)


def _is_another_mean(view: View) -> bool:
    """True if the ranks hold what they computed, and reducing this is not enough."""
    places = view.parameters.positions_of(sorted(view.measured.differing))
    held, right = view.measured.by_rank[:, places], view.expected[places]
    own = view.local_gradients[0][:, places] if view.local_gradients else None
    if own is None or own.shape != held.shape or not nearly_equal(held, own):
        return False
    if is_divided_up(view) is False or nearly_equal(held, held[:1].expand_as(held)):
        return False  # not reducing is no fault where the ranks have the same, or wrong examples
    return not is_multiple(held.mean(0), right)


def _lines(hypothesis: Hypothesis, view: View) -> tuple[PointedLine, ...]:
    """Those of the cause, and what set the number that the faulty one uses."""
    lines = hypothesis.lines(view)
    found, known = list(lines), {one.line for one in lines}
    rank = min(view.observed.by_rank, default=0)
    if hypothesis.of_a_number and len(found) < MOST_LINES:
        made = [line for one in lines if one.is_fault for line in _numbers(view, rank, one)]
        found = [*(one for one in made[:1] if one.line not in known), *found]
    return tuple(found[: max(MOST_LINES, len(lines))])


def _numbers(view: View, rank: int, pointed: PointedLine) -> list[PointedLine]:
    return [replace(one, is_fault=True) for one in lines_of_divisor(view, rank, pointed.line)]


@dataclass(frozen=True)
class ScaledPrediction:
    """A prediction that fits once it is multiplied by ``factor``, up to the ``residual``.

    ``held``: the prediction times the factor. ``is_a_right_step``: ranks that make neither mistake
    would hold the same.
    """

    hypothesis: Hypothesis
    prediction: Prediction
    factor: float
    held: Tensor
    residual: float
    is_a_right_step: bool

    def finding(self, view: View, **more: Any) -> Finding:
        """The finding of its cause, which leaves the factor to something else."""
        indication = self.hypothesis.indication(view)
        found = replace(
            finding_without_prediction(self.hypothesis),
            unexplained=without_rounding(self.residual),
            fits=True,
            detail=self.prediction.detail,
            because=indication.because if indication else "",
        )
        return replace(found, **more)


def scaled_predictions(
    view: View, most_unexplained: float, limits: LimitByName
) -> list[ScaledPrediction]:
    """The predictions that fit the measurement once they are multiplied by some factor.

    Raises OutOfTime.
    """
    found = []
    for hypothesis in HYPOTHESES:
        view.time.require()
        if _is_refuted(view, hypothesis):
            continue
        for prediction in hypothesis.predict(view):
            if prediction.fitted or nearly_equal(prediction.by_rank, view.expected_by_rank):
                continue
            factor = nearest_factor(view.measured.by_rank, prediction.by_rank)
            if factor is None:
                continue
            held = factor * prediction.by_rank
            residual = unexplained(view.measured.by_rank, held)
            if residual <= most_unexplained and explains_every_parameter(view, held, limits):
                right = _is_a_right_step(view, held)
                found.append(
                    ScaledPrediction(hypothesis, prediction, factor, held, residual, right)
                )
    return found


def _is_a_right_step(view: View, held: Tensor) -> bool:
    """True for what ranks hold that make no mistake: the big batch, or what they have computed
    themselves, however wrong, reduced as it should be.
    """
    add_up = view.parts.add_up_to_the_big_batch
    own = (local.sum(0) if add_up else local.mean(0) for local in view.local_gradients)
    return any(nearly_equal(held, view.on_every_rank(one)) for one in (view.expected, *own))


def two_causes_at_once(
    view: View, predictions: Sequence[ScaledPrediction], most_unexplained: float
) -> list[Finding]:
    """Every pair of a cause and another one that is its factor."""
    factors = [
        (hypothesis, factor)
        for hypothesis in HYPOTHESES
        if predictions and not _is_refuted(view, hypothesis)
        for factor in hypothesis.factors(view)
    ]
    findings: dict[tuple[str, ...], Finding] = {}
    for scaled in predictions:
        for hypothesis, factor in factors:
            agrees = abs(scaled.factor / factor.value - 1) <= max(NEGLIGIBLE, most_unexplained)
            if not agrees or hypothesis.name == scaled.hypothesis.name:
                continue
            if scaled.is_a_right_step or _is_one_wrong_divisor(view, scaled):
                continue
            if _is_unseen(view, scaled.hypothesis) or _cancel(
                view, scaled.hypothesis, factor.value
            ):
                continue
            detail = "; ".join(filter(None, (scaled.prediction.detail, factor.detail)))
            second = finding_without_prediction(hypothesis)
            finding = scaled.finding(view, detail=detail, more=(second,))
            findings.setdefault(finding.causes, finding)
    return list(findings.values())


def _cancel(view: View, hypothesis: Hypothesis, factor: float) -> bool:
    """True if a cause multiplies by the number by which something else divides: what is left of
    both is a term that only one of them concerns, such as a penalty, and this is a mistake by
    itself.
    """
    return any(abs(one.value * factor - 1) <= NEGLIGIBLE for one in hypothesis.factors(view))


def _is_one_wrong_divisor(view: View, scaled: ScaledPrediction) -> bool:
    """True if dividing the sum over the ranks by one wrong number explains as much as two causes.

    So it is where both causes are factors, and nothing was observed of the first one.
    """
    factor = nearest_factor(scaled.held, view.expected_by_rank)
    if factor is None or factor <= 0 or not is_multiple(scaled.held, view.expected_by_rank):
        return False
    divisor = view.world_size / factor
    is_whole = abs(divisor - round(divisor)) < NEGLIGIBLE * divisor
    return is_whole and scaled.hypothesis.indication(view) is None


def _is_refuted(view: View, hypothesis: Hypothesis) -> bool:
    indication = hypothesis.indication(view)
    return indication is not None and not indication.supports


def _is_unseen(view: View, hypothesis: Hypothesis) -> bool:
    """True if neither an observation nor a line shows this cause. With a factor that is taken from
    the measurement as well it would explain too much.
    """
    return hypothesis.indication(view) is None and not hypothesis.lines(view)


def one_cause_and_a_factor(view: View, predictions: Sequence[ScaledPrediction]) -> list[Finding]:
    """Every cause that explains all but one positive factor, which no cause explains.

    If the cause itself only multiplies the right gradient, or if the ranks may have reduced wrong
    gradients as they should, the factor must be that of the losses at which backward was seen to
    begin: any number would be explained otherwise. It must then be nearer to 1 than both are
    together: losses that are divided by a count of all ranks begin at 1 / world size of their own
    mean, and to sum their gradients is right, so that not the sum is wrong, but the count.
    """
    findings: dict[str, Finding] = {}
    of_losses, held = _factor_of_losses(view), view.measured.by_rank
    own = [view.on_every_rank(local.mean(0)) for local in view.local_gradients]
    anything_fits = any(is_multiple(held, one) for one in own)
    for scaled in predictions:
        if scaled.factor <= 0 or _is(scaled.factor, 1.0) or _is_unseen(view, scaled.hypothesis):
            continue
        if _cancel(view, scaled.hypothesis, scaled.factor):
            continue
        is_factor = is_multiple(scaled.prediction.by_rank, view.expected_by_rank)
        if anything_fits or is_factor or scaled.is_a_right_step:
            together = nearest_factor(scaled.held, view.expected_by_rank) or 0.0
            is_the_lesser = together <= 0 or abs(log(scaled.factor)) < abs(log(together))
            if of_losses is None or not _is(of_losses, scaled.factor) or not is_the_lesser:
                continue
        finding = scaled.finding(view, fitted=True, besides=scaled.factor)
        findings.setdefault(finding.cause, finding)
    return list(findings.values())


def _factor_of_losses(view: View) -> float | None:
    """By what the losses of a window, taken together, are multiplied; None if that is 1."""
    common = common_loss_factor(view)
    if common is None or view.parts.add_up_to_the_big_batch:
        return None
    counts = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    factor = common * counts.pop() if len(counts) == 1 else 1.0
    return None if _is(factor, 1.0) else factor


def with_factor_of_own_gradients(findings: tuple[Finding, ...], view: View) -> tuple[Finding, ...]:
    """The findings; those that were predicted from what the ranks were seen to compute get the
    factor that all of this has beside what their rows give. Raises OutOfTime.
    """
    if not any(one.accepted for one in findings):
        return findings
    if is_divided_up(view) is False:
        return findings  # what is read twice, or not at all, has other counts
    factor = _factor_of_losses(view)
    held = view.measured.by_rank
    if factor is None or is_multiple(held, view.expected_by_rank):
        return findings
    if view.setting.every_rank_reports and nearly_equal(held.sum(0), view.expected):
        return findings  # they only have to be added up
    return tuple(
        replace(one, besides=factor) if _is_left_by(one, view, factor) else one for one in findings
    )


def _is_left_by(finding: Finding, view: View, factor: float) -> bool:
    """True if a prediction of this cause fits only once it is multiplied by the factor."""
    if not finding.accepted or finding.more or finding.fitted:
        return False
    cause = CAUSE_OF.get(finding.cause)
    predictions = cause.predict(view) if cause is not None else ()
    return any(nearly_equal(view.measured.by_rank, factor * one.by_rank) for one in predictions)


def _is(factor: float, other: float) -> bool:
    return abs(factor - other) <= FITTED * abs(other)


LEAST_ACCEPTED = 1e-10
"""The rounding of float64: a right explanation may leave this much unexplained."""

AS_GOOD = 2.0
"""An explanation is as good as the best one if at most this many times as much is unexplained."""

ROUNDING = 8.0
"""It is also as good if it leaves at most this many eps of the case's dtype unexplained."""


def without_rounding(residual: float) -> float:
    """Zero for a residual that is only rounding, so that such explanations are equally good."""
    return 0.0 if residual < LEAST_ACCEPTED / 10 else residual


def ranked(findings: Sequence[Finding], dtype: torch.dtype) -> tuple[Finding, ...]:
    """All findings, the best first; those that are as good as the best are accepted.

    Equally good findings keep their order, which is the order in which hypotheses are believed.
    """
    candidates = _most_credible([finding for finding in findings if finding.explains])
    best = min((finding.unexplained or 0.0 for finding in candidates), default=0.0)
    most = max(AS_GOOD * best, ROUNDING * torch.finfo(dtype).eps, LEAST_ACCEPTED)
    accepted = {id(finding) for finding in candidates if (finding.unexplained or 0.0) <= most}
    return tuple(
        sorted(
            [replace(finding, accepted=id(finding) in accepted) for finding in findings],
            key=_position,
        )
    )


def _most_credible(explaining: list[Finding]) -> list[Finding]:
    """The findings of the most credible kind that there is.

    A finding that an observation supports is more credible than one that only fits the numbers.
    Among either, a prediction that took no number from the measurement is more credible.
    """
    for observed, fitted in ((True, False), (True, True), (False, False), (False, True)):
        group = [
            finding
            for finding in explaining
            if bool(finding.because) is observed and finding.fitted is fitted
        ]
        if group:
            return group
    return []


def _position(finding: Finding) -> tuple[bool, bool, float]:
    residual = inf if finding.unexplained is None else in_order(finding.unexplained)
    return not finding.accepted, not finding.fits, 0.0 if finding.accepted else residual


@dataclass(frozen=True)
class Finding:
    """One explanation and what it leaves unexplained: ||measured - predicted|| / ||measured||.

    ``cause``: its public name. ``sentence``: what happened. ``look_at``: where in the code to look.
    ``unexplained`` is None where nothing could be predicted. ``accepted``: this explanation is
    believed. ``fits``: its numbers agree with the measurement; it is not accepted if a better
    explanation fits too. ``would_show``: False where this cause leaves the big batch's gradient on
    this case.

    ``detail``: the ranks, numbers or micro-batches that it is about, as a clause of the report.
    ``fitted``: some numbers of the prediction were taken from the measurement. ``because``: what
    was observed for or against the cause. ``refuted``: this observation speaks against it.
    ``tell_apart``: the change of the case after which no other cause leaves the same numbers.
    ``more``: the other causes, where only several together explain the measurement. They bring
    their sentence and the place to look; all else stands in the first one.

    ``headline``: the sentence in a few words. ``fix``: what to write instead, on one line.
    ``lines``: the lines of the user's code that show what happened. Both are given only where the
    explanation is believed. ``is_guess``: its lines show no more than what the step does; that one
    of them is wrong is told by the numbers alone. ``besides``: a factor that all gradients have
    besides, which the cause does not explain; None without one. ``leaves_a_mistake``: the step
    would still be wrong after the fix.
    """

    cause: str
    sentence: str
    look_at: str
    unexplained: float | None = None
    accepted: bool = False
    would_show: bool = True
    fits: bool = False
    detail: str = ""
    because: str = ""
    refuted: bool = False
    tell_apart: str = ""
    fitted: bool = False
    more: tuple[Finding, ...] = ()
    headline: str = ""
    fix: str = ""
    lines: tuple[PointedLine, ...] = ()
    is_guess: bool = False
    besides: float | None = None
    leaves_a_mistake: bool = False

    @property
    def causes(self) -> tuple[str, ...]:
        """The names of all causes that it takes to explain the measurement."""
        return (self.cause, *(one.cause for one in self.more))

    @property
    def explains(self) -> bool:
        """True if the numbers fit and no observation speaks against the cause."""
        return self.fits and not self.refuted


def finding_without_prediction(hypothesis: Hypothesis) -> Finding:
    """A finding with the texts of the hypothesis, before anything is predicted or accepted."""
    return Finding(
        cause=hypothesis.name,
        sentence=hypothesis.sentence,
        look_at=hypothesis.look_at,
        tell_apart=hypothesis.tell_apart,
        headline=hypothesis.headline,
    )


def finding_from_observation(hypothesis: Hypothesis, because: str = "") -> Finding:
    """A finding that fits by observation, or because the case makes it likely; no prediction."""
    return replace(finding_without_prediction(hypothesis), fits=True, because=because)


def finding_of_wrong_collectives(wrong: Sequence[str]) -> Finding:
    """The finding that collectives give wrong answers. It comes before every cause in the step.

    ``wrong``: the wrong answers, as phrases.
    """
    return Finding(
        cause="collective_wrong",
        sentence="The collectives themselves give wrong answers here, whatever the step does.",
        look_at="the backend and its library, before the step: ddp-equivalence doctor tests them",
        accepted=True,
        fits=True,
        headline="the collectives themselves answer wrongly",
        fix="repair the backend, not the step: run ddp-equivalence doctor.",
        because="; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""),
    )
