"""Which learning rate follows from one that worked, and what each way to scale it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import sqrt

from ddp_equivalence.commands.explain.setup import Setup

ADAM_BETAS = (Fraction(9, 10), Fraction(999, 1000))
ADAM_EPS = Fraction(1, 10**8)
"""torch.optim.Adam's own defaults."""


@dataclass(frozen=True)
class AdamSettings:
    """torch's default betas and eps under the square-root rule for adaptive methods.

    Source: Malladi et al. 2022, arXiv 2205.10287, with kappa = the batch over the known one:
    lr sqrt(kappa), 1 - kappa (1 - beta), eps / sqrt(kappa). ``betas``: None where kappa is so large
    that one of them would not stay above 0. ``eps``: before a factor on the gradient.
    """

    betas: tuple[Fraction, Fraction] | None
    eps: float


@dataclass(frozen=True)
class LearningRates:
    """Learning rates for this setup's gradient, which is ``relative`` times that of a setup with
    the loss of the known good one.

    ``scaling``: this effective batch over the known one. ``same_step``: the step for the same mean
    gradient is as long as with the known good one, and at the same batch every update the same.
    ``linear``: the update per example stays; for Adam, where noise is little of the gradient.
    ``square_root``: the variance of the update stays. ``adam``: the other settings of the
    square-root rule, for Adam.
    """

    scaling: Fraction
    relative: Fraction
    same_step: Fraction
    linear: Fraction
    square_root: float
    adam: AdamSettings | None

    @property
    def names_eps(self) -> bool:
        """Whether the square-root rule has an eps of its own for Adam, and reaches so far."""
        return self.scaling != 1 and self.adam is not None and self.adam.betas is not None


def learning_rates_of(setup: Setup, factor: Fraction) -> LearningRates | None:
    """None where no learning rate is known to be good. ``factor``: of the gradient, in g."""
    known = setup.known_good
    if known is None:
        return None
    scaling = Fraction(setup.effective_batch, known.batch)
    relative = factor / known.factor
    if setup.optimizer == "adam":  # a constant factor cancels: m / (sqrt(v) + eps)
        base, adam = known.learning_rate, _adam_settings(scaling)
    else:
        base, adam = known.learning_rate / relative, None
    square_root = float(base) * sqrt(scaling)
    return LearningRates(scaling, relative, base, base * scaling, square_root, adam)


def _adam_settings(scaling: Fraction) -> AdamSettings:
    first, second = (1 - scaling * (1 - beta) for beta in ADAM_BETAS)
    eps = float(ADAM_EPS) / sqrt(scaling)
    return AdamSettings((first, second) if min(first, second) > 0 else None, eps)
