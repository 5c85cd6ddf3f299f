"""Run an explained setup on ranks, and compare what they find with what was worked out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from ddp_equivalence.case import settings
from ddp_equivalence.check_equivalence import check
from ddp_equivalence.commands.explain.arithmetic import explain
from ddp_equivalence.commands.explain.cases import case_of, counts_of
from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.judged import ExpectedResult, expected, expected_text, judged
from ddp_equivalence.commands.explain.known_good import KnownGood
from ddp_equivalence.commands.explain.measured import measured
from ddp_equivalence.commands.explain.not_run import not_run
from ddp_equivalence.commands.explain.numbers import number, times
from ddp_equivalence.commands.explain.scaled_down import scaled_down
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.commands.explain.stand_in import can_train, trained_stand_ins
from ddp_equivalence.commands.explain.steps import gradient_step, mended_step, training
from ddp_equivalence.commands.explain.verified import ComparedPrediction, Verification
from ddp_equivalence.report.verdict import Verdict

STEPS = 3
LEARNING_RATE = Fraction(1, 10)
EPS = 1e-3
"""Adam's eps in the training: with torch's default of 1e-8 a wrong factor of it would not show."""
SLOWEST, FASTEST = 1e-4, 0.5
"""The learning rates with which the small model trains; a known one outside them is replaced."""

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def verify(explanation: Explanation) -> Verification:
    """Run the setup on ranks, scaled down if it is large.

    If the ranks find something else than the explanation says, the Verification says so; nothing is
    raised.
    """
    setup, scaled = scaled_down(explanation.setup)
    # A smaller setup needs its own prediction. Otherwise the given explanation is verified.
    predicted = explain(setup) if scaled else explanation
    mended = not predicted.is_multiple
    with settings.using(settings.replaced(second_look=False)):
        verdict, gradient = _gradient(setup, predicted)
        if predicted.is_multiple != explanation.is_multiple:
            why = (
                "Scaled down, it is not the same question: of the two setups, only one has a "
                "gradient that is a multiple of g."
            )
            gradient = replace(gradient, outcome="unknown", why=why)
        comparisons = [gradient]
        if mended:
            comparisons.append(_mended(setup, predicted))
        comparisons.append(_training(setup, predicted, mended))
        rates = explanation.learning_rates
        if rates is not None and can_train(rates.scaling):
            comparisons += trained_stand_ins(setup, rates)
    left_out = not_run(explanation)
    return Verification(setup, verdict.lane.name, scaled, tuple(comparisons), left_out)


def _gradient(setup: Setup, predicted: Explanation) -> tuple[Verdict, ComparedPrediction]:
    """The gradient of the setup as it was given."""
    verdict = check(case_of(setup, 1), partial(gradient_step, setup))
    counts = counts_of(setup)
    return verdict, _compared("gradient", expected(predicted, counts), verdict, counts)


def _mended(setup: Setup, predicted: Explanation) -> ComparedPrediction:
    """The gradient of the setup after the change that the explanation advises."""
    what = "gradient with one loss over the gathered outputs"
    if setup.loss == "token-mean":
        what = "gradient with one count of all tokens"
    verdict = check(case_of(setup, 1), partial(mended_step, setup))
    return _compared(what, ExpectedResult(predicted.mended_factor, None, predicted.unit), verdict)


def _compared(
    what: str, predicted: ExpectedResult, verdict: Verdict, counts: Sequence[int] | None = None
) -> ComparedPrediction:
    gradients = measured(verdict)
    if gradients is None or (verdict.outcome == "unknown" and verdict.reason):
        wanted = expected_text(predicted)
        return ComparedPrediction(what, wanted, "nothing", "unknown", _why_unknown(verdict))
    return judged(what, predicted, gradients, counts)


def _training(setup: Setup, predicted: Explanation, mended: bool) -> ComparedPrediction:
    """Training with the learning rate that was worked out, and one big batch with the known one."""
    known, given = _trainable(setup), setup.known_good
    if predicted.learning_rates is None or known != given:
        setup = replace(setup, known_good=known)
        predicted = explain(setup)
    assert predicted.learning_rates is not None
    rate, wanted = float(predicted.learning_rates.same_step), float(_rate_for_mean(known))
    of_ranks: MakeOptimizer = partial(torch.optim.SGD, lr=rate)
    of_one: MakeOptimizer = partial(torch.optim.SGD, lr=wanted)
    eps = ""
    if setup.is_adam:
        # The known loss has the same steps with its own eps, so one big batch takes its mean.
        wanted, factor = rate, predicted.mended_factor
        of_ranks = partial(torch.optim.Adam, lr=rate, eps=EPS * float(factor))
        of_one = partial(torch.optim.Adam, lr=wanted, eps=EPS)
        eps = f" and eps {number(EPS)}" + (f" x {times(factor)}" if factor != 1 else "")
    what = (
        f"{STEPS} {'Adam' if eps else 'SGD'} steps with "
        f"{'that change and ' if mended else ''}learning rate {number(rate)}{eps}, one big batch "
        f"with {number(wanted)}{f' and {number(EPS)}' if eps else ''}"
    )
    if given is not None and known != given:
        what += f" in place of your {number(given.learning_rate)}"
    step = partial(training, setup, mended, of_ranks)
    verdict = check(case_of(setup, STEPS), step, compare="update", optimizer=of_one, steps=STEPS)
    same = "the same weights"
    if verdict.outcome == "unknown":
        return ComparedPrediction(what, same, "nothing", "unknown", _why_unknown(verdict))
    if verdict.outcome == "same":
        return ComparedPrediction(what, same, same, "agrees")
    return ComparedPrediction(what, same, f"something else (error {verdict.error:.2g})", "differs")


def _why_unknown(verdict: Verdict) -> str:
    failure = f" {verdict.failure}" if verdict.failure else ""
    return f"{verdict.reason}.{failure}".strip()


def _trainable(setup: Setup) -> KnownGood:
    """The known good learning rate, or 0.1 if the small model cannot train with it."""
    known = setup.known_good
    if known is not None:
        rate = known.learning_rate if setup.is_adam else _rate_for_mean(known)
        if SLOWEST <= rate <= FASTEST:
            return known
    return KnownGood(setup.effective_batch, LEARNING_RATE)


def _rate_for_mean(known: KnownGood) -> Fraction:
    """The learning rate of SGD that trains the same if the known loss is taken as a mean."""
    return known.learning_rate * known.factor
