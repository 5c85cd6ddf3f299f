"""The learning rate to start with where the batch has changed, and what goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.learning_rates import LearningRates
from ddp_equivalence.commands.explain.numbers import number, times


@dataclass(frozen=True)
class StartingPoint:
    """``rate``: the learning rate. ``how``: the rule that gives it, and how to use it.

    ``why``: what it keeps. ``others``: what the other rates keep. ``beside``: a sentence on other
    settings.
    """

    rate: float
    how: str
    why: str
    others: str
    beside: str


def starting_point(explanation: Explanation, rates: LearningRates) -> StartingPoint:
    """The learning rate that people found to carry over best to another batch, by optimizer.

    Sources: for SGD the linear rule of Goyal et al. 2017, arXiv 1706.02677, which keeps momentum
    and weight decay; for Adam the square-root rule of Malladi et al. 2022, arXiv 2205.10287.
    """
    return _for_adam(rates) if explanation.setup.optimizer == "adam" else _for_sgd(rates)


def _for_sgd(rates: LearningRates) -> StartingPoint:
    by_then = ", reached over the first epochs" if rates.scaling > 1 else ""
    same, root = number(rates.same_step), number(rates.square_root)
    keep = "Keep momentum and weight_decay"
    if rates.relative != 1:
        keep = "Keep momentum, and multiply weight_decay and clipping's max_norm by "
        keep += times(rates.relative)
    return StartingPoint(
        rate=float(rates.linear),
        how=f"(linear, x {times(rates.scaling)}){by_then}",
        why="it keeps the update per example",
        others=f"{same} keeps the length of a step, {root} the variance of the update.",
        beside=f"{keep}: an epoch then decays the weights as much as before.",
    )


def _for_adam(rates: LearningRates) -> StartingPoint:
    assert rates.adam is not None
    same = number(rates.same_step)
    if rates.adam.betas is None:
        return StartingPoint(
            rate=float(rates.same_step),
            how="(unchanged)",
            why="it keeps the length of a step",
            others="The square-root rule does not reach so far with torch's betas.",
            beside=_decay_of_adamw(times(rates.scaling)),
        )
    root = number(float(rates.scaling) ** 0.5)
    betas = ", ".join(number(beta) for beta in rates.adam.betas)
    return StartingPoint(
        rate=rates.square_root,
        how=f"(square root, x {root}) and betas ({betas})",
        why="it keeps the path and the noise of the weights where noise is most of the gradient",
        others=f"{same} keeps the length of a step.",
        beside=_decay_of_adamw(root),
    )


def _decay_of_adamw(by: str) -> str:
    """An epoch decays the weights by rate x weight_decay x steps, and has fewer steps."""
    more = "an epoch then decays the weights as much as before"
    return f"With AdamW multiply weight_decay by {by}: {more}."
