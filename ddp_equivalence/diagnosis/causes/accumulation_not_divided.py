"""Losses of micro-batches were added up and not divided by their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
)
from ddp_equivalence.diagnosis.indications import common_loss_factor, losses_close
from ddp_equivalence.diagnosis.view import View

SURELY_DIVIDED = 0.9
"""A loss below this part of its micro-batch's loss was divided by something."""


def predict(view: View) -> Sequence[Prediction]:
    """The sum over each rank's micro-batches, averaged over the ranks."""
    parts = view.parts.by_rank
    if parts is None or view.parts.add_up_to_the_big_batch:
        return ()
    if all(len(of_rank) == 1 for of_rank in parts):
        return ()
    sums = [torch.stack([view.examples.gradient(p) for p in of_rank]).sum(0) for of_rank in parts]
    detail = f"{max(map(len, parts))} micro-batches in the accumulation window"
    return (Prediction(view.on_every_rank(torch.stack(sums).mean(0)), detail),)


def factors(view: View) -> Sequence[WrongFactor]:
    """The number of micro-batches, where their losses should be averaged."""
    count = view.parts.micro_batches_per_rank
    if count is None or count == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    return (WrongFactor(count, f"multiplied by {count}, the number of micro-batches"),)


def indication(view: View) -> Indication | None:
    """Compares the losses at which backward began with those of the micro-batches."""
    factor = common_loss_factor(view)
    if factor is None or view.parts.micro_batches_per_rank in (None, 1):
        return None
    if losses_close(factor, 1.0):
        return Indication(True, "every backward began at the loss of its micro-batch, not divided")
    if factor < SURELY_DIVIDED:
        return Indication(False, "the losses of the micro-batches were divided")
    return None


HYPOTHESIS = Hypothesis(
    name="accumulation_not_divided",
    sentence="The losses of the micro-batches were added up, not divided by their number.",
    look_at="the loss before backward: divide it there (loss / accumulation_steps)",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Use another number of micro-batches, not a multiple of the number of ranks.",
)
