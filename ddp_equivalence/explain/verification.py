"""Run what was explained on ranks, and hold what they find against what was worked out."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial

from ddp_equivalence import session
from ddp_equivalence.explain.arithmetic import Explanation, explain
from ddp_equivalence.explain.cases import case_of, counts_of
from ddp_equivalence.explain.known_good import KnownGood
from ddp_equivalence.explain.measured import measured
from ddp_equivalence.explain.numbers import number
from ddp_equivalence.explain.scaled_down import scaled_down
from ddp_equivalence.explain.setup import Setup
from ddp_equivalence.explain.steps import gradient_step, mended_step, training
from ddp_equivalence.explain.verified import Prediction, Verification
from ddp_equivalence.verdict import Verdict, check

EXACT = 1e-9
"""Between two factors, relative: in float64 rounding stays below 1e-12."""
LITTLE = 1e-6
"""Unexplained: a difference of squares, of which rounding makes 1e-8. Unequal counts leave more
than 1e-2.
"""

STEPS = 3
LEARNING_RATE = Fraction(1, 10)
SLOWEST, FASTEST = 1e-4, 0.5
"""Learning rates with which the small model trains; another known one is replaced."""


def verify(explanation: Explanation) -> Verification:
    """Run the setup on ranks, scaled down if it is large. Raises nothing for what they find."""
    setup, scaled = scaled_down(explanation.setup)
    # A small setup has a prediction of its own; that of the full size is kept where it can be.
    predicted = explain(setup) if scaled else explanation
    with session.using(session.replaced(second_look=False)):
        verdict, found = _gradient(setup, predicted)
        comparisons = [found]
        if predicted.is_multiple and setup.optimizer == "sgd":
            comparisons.append(_training(setup, predicted))
        if not predicted.is_multiple and setup.loss == "token-mean":
            comparisons.append(_mended(setup))
    return Verification(setup, verdict.lane.name, scaled, tuple(comparisons))


def _gradient(setup: Setup, predicted: Explanation) -> tuple[Verdict, Prediction]:
    what = "gradient"
    factor = float(predicted.factor)
    expected = f"{number(predicted.factor)} g"
    if not predicted.is_multiple:
        expected = f"no multiple of g, {expected} on average"
    verdict = check(case_of(setup, 1), partial(gradient_step, setup))
    found = measured(verdict, counts_of(setup))
    if found is None or (verdict.outcome == "unknown" and verdict.reason):
        return verdict, Prediction(what, expected, "nothing", "unknown", _why(verdict))
    if found.unexplained < LITTLE:
        held = f"{number(found.factor)} g"
        right = predicted.is_multiple and abs(found.factor / factor - 1) < EXACT
    else:
        held = f"no multiple of g ({found.unexplained:.2g} of it unexplained)"
        right = not predicted.is_multiple
        if found.average is not None:
            held += f", {number(found.average)} g on average"
            right = right and abs(found.average / factor - 1) < LITTLE
    return verdict, Prediction(what, expected, held, "agrees" if right else "differs")


def _training(setup: Setup, predicted: Explanation) -> Prediction:
    """With the learning rate that was worked out, against the big batch with the known one."""
    known = _trainable(setup)
    if predicted.learning_rates is None or known != setup.known_good:
        setup = replace(setup, known_good=known)
        predicted = explain(setup)
    assert predicted.learning_rates is not None
    rate, wanted = float(predicted.learning_rates.same_step), float(_of_mean(known))
    what = (
        f"{STEPS} SGD steps with learning rate {number(rate)}, one big batch with {number(wanted)}"
    )
    step = partial(training, setup, rate, STEPS)
    verdict = check(case_of(setup, STEPS), step, compare="update", lr=wanted, steps=STEPS)
    return _same(what, "the same weights", verdict)


def _mended(setup: Setup) -> Prediction:
    verdict = check(case_of(setup, 1), partial(mended_step, setup))
    return _same("gradient with the tokens counted over all", "g", verdict)


def _same(what: str, expected: str, verdict: Verdict) -> Prediction:
    if verdict.outcome == "unknown":
        return Prediction(what, expected, "nothing", "unknown", _why(verdict))
    if verdict.outcome == "same":
        return Prediction(what, expected, expected, "agrees")
    return Prediction(what, expected, f"something else (error {verdict.error:.2g})", "differs")


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
