"""The learning rates that follow from one that worked, and what each of them keeps."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import sqrt

from ddp_equivalence.commands.explain.setup import Setup

ADAM_EPS = Fraction(1, 10**8)
"""The default of torch.optim.Adam."""

SMALLEST_BETA = Fraction(1, 2)
"""The square-root rule is used for betas from here on: a mean is of 1 / (1 - beta) gradients.

The rule is derived for means of many gradients. Elsewhere the known betas keep as much: a test
trains the stand-in with them at eight times the batch.
"""


@dataclass(frozen=True)
class AdamSettings:
    """The betas and eps that the square-root rule for adaptive methods makes of those before.

    Source: Malladi et al. 2022, arXiv 2205.10287. With kappa = batch / known batch they are
    1 - kappa (1 - beta) and eps / sqrt(kappa), for the learning rate lr sqrt(kappa).
    ``rule_betas``: these betas, which may be 0 or below. ``betas``: those to use, which are the
    known ones unless all of them are at least SMALLEST_BETA. ``eps``: the value for a gradient
    without an additional factor.
    """

    rule_betas: tuple[Fraction, Fraction]
    betas: tuple[Fraction, Fraction]
    eps: float

    @property
    def in_reach(self) -> bool:
        """True if the betas to use are those of the rule."""
        return self.betas == self.rule_betas


@dataclass(frozen=True)
class LearningRates:
    """The learning rates for a setup's gradient.

    ``scaling``: the effective batch divided by the known batch. ``relative``: the setup's gradient
    as a multiple of the gradient that the loss of the known good training gives. ``same_step``
    keeps the length of the step for the same mean gradient; at the known batch it keeps every
    update. ``linear`` keeps the update per example; with Adam only if the gradient has little
    noise. ``square_root`` keeps the variance of the update. ``adam``: Adam's other settings under
    the square-root rule.
    """

    scaling: Fraction
    relative: Fraction
    same_step: Fraction
    linear: Fraction
    square_root: float
    adam: AdamSettings | None

    @property
    def names_eps(self) -> bool:
        """True if the square-root rule gives Adam an eps: at another batch than the known one."""
        return self.scaling != 1 and self.adam is not None


def learning_rates_of(setup: Setup, factor: Fraction) -> LearningRates | None:
    """The learning rates for a gradient of ``factor`` x g; None if none is known to be good."""
    known = setup.known_good
    if known is None:
        return None
    scaling = Fraction(setup.effective_batch, known.batch)
    relative = factor / known.factor
    if setup.is_adam:  # a constant factor cancels in m / (sqrt(v) + eps)
        base, adam = known.learning_rate, _adam_settings(scaling, setup.betas)
    else:
        base, adam = known.learning_rate / relative, None
    square_root = float(base) * sqrt(scaling)
    return LearningRates(scaling, relative, base, base * scaling, square_root, adam)


def _adam_settings(scaling: Fraction, betas: tuple[Fraction, Fraction]) -> AdamSettings:
    first, second = betas
    by_rule = 1 - scaling * (1 - first), 1 - scaling * (1 - second)
    eps = float(ADAM_EPS) / sqrt(scaling)
    in_reach = min(*by_rule, *betas) >= SMALLEST_BETA
    return AdamSettings(by_rule, by_rule if in_reach else betas, eps)
