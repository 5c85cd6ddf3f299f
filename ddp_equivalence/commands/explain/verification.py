"""Run what was explained on ranks, and hold what they find against what was worked out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from ddp_equivalence.case import settings
from ddp_equivalence.check_equivalence import check
from ddp_equivalence.commands.explain.arithmetic import Explanation, explain
from ddp_equivalence.commands.explain.cases import case_of, counts_of
from ddp_equivalence.commands.explain.judged import Expected, expected, judged, said
from ddp_equivalence.commands.explain.known_good import KnownGood
from ddp_equivalence.commands.explain.measured import measured
from ddp_equivalence.commands.explain.not_run import not_run
from ddp_equivalence.commands.explain.numbers import number
from ddp_equivalence.commands.explain.scaled_down import scaled_down
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.commands.explain.steps import gradient_step, mended_step, training
from ddp_equivalence.commands.explain.verified import Prediction, Verification
from ddp_equivalence.report.verdict import Verdict

STEPS = 3
LEARNING_RATE = Fraction(1, 10)
SLOWEST, FASTEST = 1e-4, 0.5
"""Learning rates with which the small model trains; another known one is replaced."""


def verify(explanation: Explanation) -> Verification:
    """Run the setup on ranks, scaled down if it is large. Raises nothing for what they find."""
    setup, scaled = scaled_down(explanation.setup)
    # A small setup has a prediction of its own; that of the full size is kept where it can be.
    predicted = explain(setup) if scaled else explanation
    mended = not predicted.is_multiple
    with settings.using(settings.replaced(second_look=False)):
        verdict, found = _gradient(setup, predicted)
        if predicted.is_multiple != explanation.is_multiple:
            why = "Scaled down, it is not the same question: one is a multiple of g."
            found = replace(found, outcome="unknown", why=why)
        comparisons = [found]
        if mended:
            comparisons.append(_mended(setup, predicted))
        if setup.optimizer == "sgd":
            comparisons.append(_training(setup, predicted, mended))
    left_out = not_run(explanation)
    return Verification(setup, verdict.lane.name, scaled, tuple(comparisons), left_out)


def _gradient(setup: Setup, predicted: Explanation) -> tuple[Verdict, Prediction]:
    verdict = check(case_of(setup, 1), partial(gradient_step, setup))
    counts = counts_of(setup)
    return verdict, _held("gradient", expected(predicted, counts), verdict, counts)


def _mended(setup: Setup, predicted: Explanation) -> Prediction:
    """The gradient with the advice followed."""
    what = "gradient with one loss over the gathered outputs"
    if setup.loss == "token-mean":
        what = "gradient with the tokens counted over all"
    verdict = check(case_of(setup, 1), partial(mended_step, setup))
    return _held(what, Expected(predicted.mended_factor, None), verdict)


def _held(
    what: str, predicted: Expected, verdict: Verdict, counts: Sequence[int] | None = None
) -> Prediction:
    found = measured(verdict)
    if found is None or (verdict.outcome == "unknown" and verdict.reason):
        return Prediction(what, said(predicted), "nothing", "unknown", _why(verdict))
    return judged(what, predicted, found, counts)


def _training(setup: Setup, predicted: Explanation, mended: bool) -> Prediction:
    """With the learning rate that was worked out, against the big batch with the known one."""
    known, given = _trainable(setup), setup.known_good
    if predicted.learning_rates is None or known != given:
        setup = replace(setup, known_good=known)
        predicted = explain(setup)
    assert predicted.learning_rates is not None
    rate, wanted = float(predicted.learning_rates.same_step), float(_of_mean(known))
    what = (
        f"{STEPS} SGD steps{' after that' if mended else ''} with learning rate {number(rate)}, "
        f"one big batch with {number(wanted)}"
    )
    if given is not None and known != given:
        what += f" in place of your {number(given.learning_rate)}"
    step = partial(training, setup, mended, rate, STEPS)
    verdict = check(case_of(setup, STEPS), step, compare="update", lr=wanted, steps=STEPS)
    same = "the same weights"
    if verdict.outcome == "unknown":
        return Prediction(what, same, "nothing", "unknown", _why(verdict))
    if verdict.outcome == "same":
        return Prediction(what, same, same, "agrees")
    return Prediction(what, same, f"something else (error {verdict.error:.2g})", "differs")


def _why(verdict: Verdict) -> str:
    failure = f" {verdict.failure}" if verdict.failure else ""
    return f"{verdict.reason}.{failure}".strip()


def _trainable(setup: Setup) -> KnownGood:
    """What is known to be good; 0.1 where nothing is, or where the small model cannot train so."""
    known = setup.known_good
    if known is not None and SLOWEST <= _of_mean(known) <= FASTEST:
        return known
    return KnownGood(setup.effective_batch, LEARNING_RATE)


def _of_mean(known: KnownGood) -> Fraction:
    """The learning rate that a mean loss over the known batch takes to train as it did."""
    return known.learning_rate * known.factor
