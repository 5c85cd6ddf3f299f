"""The learning rate to start with where the batch has changed, and what goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.learning_rates import LearningRates
from ddp_equivalence.commands.explain.numbers import number, times


@dataclass(frozen=True)
class StartingPoint:
    """``rate``: the learning rate. ``why``: what it keeps. ``others``: what the other rates keep,
    after a space. ``beside``: a sentence on the other settings.
    """

    rate: float
    why: str
    others: str
    beside: str


def starting_point(explanation: Explanation, rates: LearningRates) -> StartingPoint:
    """The learning rate that people found to carry over best to another batch, by optimizer.

    Sources: for SGD the linear rule of Goyal et al. 2017, arXiv 1706.02677, which keeps momentum
    and weight decay; for Adam the square-root rule of Malladi et al. 2022, arXiv 2205.10287.
    """
    if explanation.setup.optimizer == "adam":
        return _for_adam(rates)
    larger = rates.scaling > 1
    by_then = ", reached over the first epochs" if larger else ""
    why = (
        f"linear, x {times(rates.scaling)}{by_then}: it keeps the update per example while the "
        "weights change slowly"
    )
    others = (
        f" {number(rates.same_step)} keeps the length of a step, and "
        f"{number(rates.square_root)} the variance of the update."
    )
    return StartingPoint(float(rates.linear), why, others, _beside_sgd(rates))


def _beside_sgd(rates: LearningRates) -> str:
    if rates.relative == 1:
        return (
            "Keep momentum and weight_decay: with the linear rate an epoch decays the weights as "
            "much as before."
        )
    factor = times(rates.relative)
    return (
        f"Keep momentum, and multiply weight_decay and clipping's max_norm by {factor}: with the "
        "linear rate an epoch then decays the weights as much as before."
    )


def _for_adam(rates: LearningRates) -> StartingPoint:
    assert rates.adam is not None
    root = number(float(rates.scaling) ** 0.5)
    if rates.adam.betas is None:
        why = (
            "unchanged: it keeps the length of a step. The square-root rule does not reach so far "
            "with torch's betas, so raise it step by step"
        )
        beside = (
            "With AdamW, an epoch then decays the weights "
            f"{times(1 / rates.scaling)} times as much as before: multiply weight_decay by "
            f"{times(rates.scaling)} to keep that."
        )
        return StartingPoint(float(rates.same_step), why, "", beside)
    betas = ", ".join(number(beta) for beta in rates.adam.betas)
    why = (
        f"square root, x {root}, with betas ({betas}): it keeps the path of the weights and its "
        "noise if noise is most of the gradient, as it is after the beginning"
    )
    decay = Fraction(rates.scaling)
    beside = (
        f"With AdamW multiply weight_decay by {number(float(decay) ** 0.5)}, so that an epoch "
        "decays the weights as much as before."
    )
    others = f" {number(rates.same_step)} keeps the length of a step."
    return StartingPoint(rates.square_root, why, others, beside)
