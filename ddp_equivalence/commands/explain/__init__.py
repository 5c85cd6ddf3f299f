"""Work out which learning rate and batch size keep training the same, and verify this on ranks."""

from __future__ import annotations

from ddp_equivalence.commands.explain.explanation import Explanation, LearningRates, explain
from ddp_equivalence.commands.explain.setup import Epoch, KnownGood, Setup, setup_like

__all__ = [
    "Epoch",
    "Explanation",
    "KnownGood",
    "LearningRates",
    "Setup",
    "explain",
    "setup_like",
]
