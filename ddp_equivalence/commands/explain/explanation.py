"""Explanation: what a setup computes, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from ddp_equivalence.commands.explain.epochs import Epoch
from ddp_equivalence.commands.explain.learning_rates import LearningRates
from ddp_equivalence.commands.explain.setup import Setup


@dataclass(frozen=True)
class Divisor:
    """One division on the way from the losses to the gradient.

    ``what`` is a phrase that says who divides and by what. ``number``: the divisor; None if it is
    not the same everywhere.
    """

    what: str
    number: Fraction | int | None


@dataclass(frozen=True)
class Explanation:
    """What a setup computes. ``str()`` gives the text. All numbers are exact except square roots.

    Let g be the gradient of the mean loss over the ``effective_batch`` examples of one step. The
    text calls g the gradient of their summed loss where that is what one device computes.

    ``divisors``: what divides the summed loss, in this order. ``factor``: every rank holds
    factor x g. If ``is_multiple`` is False, the examples (or tokens) count unequally, and they
    count ``factor`` times on average. ``mended_factor``: the factor after the change that the text
    advises; it equals ``factor`` if no change is needed. The advised change leaves accumulation as
    it is, unless it counts the tokens of all micro-batches. ``shares``: for each loss of one
    micro-batch its number of examples and how often each of them counts; empty if the sizes of the
    losses do not make the examples count unequally. ``learning_rates``: the learning rates for a
    gradient of ``mended_factor`` x g; None if no known good one was given. ``epoch``: None if the
    dataset's size was not given. ``render``: writes the text.
    """

    setup: Setup
    effective_batch: int
    divisors: tuple[Divisor, ...]
    factor: Fraction
    is_multiple: bool
    mended_factor: Fraction
    shares: tuple[tuple[int, Fraction], ...]
    learning_rates: LearningRates | None
    epoch: Epoch | None
    render: Callable[[Explanation], str] = field(repr=False, compare=False)

    @property
    def compares_sums(self) -> bool:
        """True if g in the text is the gradient of the summed loss over the effective batch.

        It is if the loss that is known to be good was a sum over as many examples. Without one, it
        is if the loss of this setup is a sum, unless that is multiplied by less than 1, as where it
        is divided by a count.
        """
        known = self.setup.known_good
        if known is None:
            return self.setup.loss == "sum" and self.setup.loss_times.number >= 1
        return known.loss == "sum" and known.batch == self.effective_batch

    @property
    def unit(self) -> int:
        """What the text calls g, as a multiple of the gradient of the mean loss."""
        return self.effective_batch if self.compares_sums else 1

    def __str__(self) -> str:
        return self.render(self)
