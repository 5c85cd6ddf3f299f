"""Work out which learning rate and batch size keep training the same, and verify this on ranks."""

from __future__ import annotations

from ddp_equivalence.commands.explain.arithmetic import explain
from ddp_equivalence.commands.explain.explanation import (
    AdamSettings,
    Divisor,
    Epoch,
    Explanation,
    KnownGood,
    LearningRates,
    LossFactor,
    Setup,
)
from ddp_equivalence.commands.explain.presets import setup_like

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
