"""Work out which learning rate and batch size keep training the same, and verify this on ranks."""

from __future__ import annotations

from ddp_equivalence.commands.explain.arithmetic import explain
from ddp_equivalence.commands.explain.epochs import Epoch
from ddp_equivalence.commands.explain.explanation import Divisor, Explanation
from ddp_equivalence.commands.explain.known_good import KnownGood
from ddp_equivalence.commands.explain.learning_rates import AdamSettings, LearningRates
from ddp_equivalence.commands.explain.loss_factor import LossFactor
from ddp_equivalence.commands.explain.presets import setup_like
from ddp_equivalence.commands.explain.setup import Setup

__all__ = [
    "AdamSettings",
    "Divisor",
    "Epoch",
    "Explanation",
    "KnownGood",
    "LearningRates",
    "LossFactor",
    "Setup",
    "explain",
    "setup_like",
]
