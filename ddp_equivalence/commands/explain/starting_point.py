"""The learning rate to start with where the batch has changed, and what goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.learning_rates import LearningRates
from ddp_equivalence.commands.explain.numbers import beta, divided_by, number, times
from ddp_equivalence.commands.explain.setup import Setup


@dataclass(frozen=True)
class StartingPoint:
    """``rate``: the learning rate. ``how``: the rule that gives it, and how to use it.

    ``why``: what it keeps. ``others``: what the other rates keep. ``beside``: what to do about
    other settings, so that an epoch decays the weights as much as before; "" if nothing.
    """

    rate: float
    how: str
    why: str
    others: str
    beside: str

    @property
    def as_sentence(self) -> str:
        """``Start with 0.4 (linear, x 4): ...``."""
        sentence = f"Start with {number(self.rate)} {self.how}: {self.why}. {self.beside_with_why}"
        return sentence.rstrip()

    @property
    def beside_with_why(self) -> str:
        """What to do about other settings, as a sentence; "" if nothing."""
        if not self.beside:
            return ""
        return f"{self.beside}: an epoch then decays the weights as much as before."


LARGEST_BATCH = 8192
"""The batch up to which Goyal et al. found linear scaling to keep the accuracy of ResNet-50 on
ImageNet (their abstract)."""


def starting_point(explanation: Explanation, rates: LearningRates) -> StartingPoint:
    """The learning rate that people found to carry over best to another batch, by optimizer.

    Sources: for SGD the linear rule of Goyal et al. 2017, arXiv 1706.02677, which keeps momentum
    and weight decay; for Adam the square-root rule of Malladi et al. 2022, arXiv 2205.10287.
    """
    if explanation.setup.is_adam:
        return _for_adam(explanation.setup, rates)
    return _for_sgd(explanation, rates)


def _for_sgd(explanation: Explanation, rates: LearningRates) -> StartingPoint:
    by_then = ", reached over the first epochs" if rates.scaling > 1 else ""
    same, root = number(rates.same_step), number(rates.square_root)
    keep = "Keep momentum and weight_decay"
    if rates.relative != 1:
        keep = "Keep momentum, and multiply weight_decay and clipping's max_norm by "
        keep += times(rates.relative)
    far = divided = ""
    if rates.scaling > 1 and explanation.effective_batch > LARGEST_BATCH:
        far = f" Beyond a batch of {LARGEST_BATCH} Goyal et al. lost accuracy with linear scaling."
    if rates.relative != 1:
        divided = f", {divided_by(rates.relative)} for the gradient"
    return StartingPoint(
        rate=float(rates.linear),
        how=f"(linear, x {times(rates.scaling)}{divided}){by_then}",
        why="an epoch then moves the weights about as far as before",
        others=f"{same} keeps a step's length, {root} its noise.{far}",
        beside=keep,
    )


def _for_adam(setup: Setup, rates: LearningRates) -> StartingPoint:
    assert rates.adam is not None
    root = number(float(rates.scaling) ** 0.5)
    whose = "" if rates.adam.in_reach else "your "
    betas = ", ".join(map(beta, rates.adam.betas))
    return StartingPoint(
        rate=rates.square_root,
        how=f"(square root, x {root}), {whose}betas ({betas}) and eps {number(rates.adam.eps)}",
        why="where noise is most of the gradient, weights move and scatter as before",
        others=f"{number(rates.same_step)} then keeps a step's length.",
        # An epoch decays the weights by rate x weight_decay x steps, and has fewer steps.
        beside=f"Multiply weight_decay by {root}" if setup.optimizer == "adamw" else "",
    )
