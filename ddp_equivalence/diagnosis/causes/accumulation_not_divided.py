"""Losses of micro-batches were added up and not divided by their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
    common_loss_factor,
    losses_close,
    micro_batches_of_a_rank,
    unrecognised_micro_batches,
)
from ddp_equivalence.diagnosis.lines.of_loss import line_of_loss, line_that_scales_loss
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
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
    if view.parts.add_up_to_the_big_batch:
        return ()
    count = view.parts.micro_batches_per_rank
    if count == 1 and (passes := unrecognised_micro_batches(view)) > 1:
        detail = f"multiplied by {passes}, the number of backward passes"
        return (WrongFactor(passes, detail),)
    if count is None or count == 1:
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


def lines(view: View) -> Sequence[PointedLine]:
    """Where the loss of a micro-batch is made, and backward, which adds it up."""
    count = micro_batches_of_a_rank(view)
    missing = f"a division by {count}"
    if count > 1 and line_that_scales_loss(view, 1 / count) is not None:
        return [place.pointed(f"adds up {count} micro-batches") for place in _last_backward(view)]
    loss = line_of_loss(view, "the loss of one micro-batch, not divided", True, missing, True)
    backwards = _last_backward(view)
    note = f"adds up {count} micro-batches"
    if loss is not None and backwards and loss.line == backwards[-1].line:
        return [replace(loss, note=f"{note}, not divided")]
    return in_order(view, loss, *(place.pointed(note) for place in backwards))


def _last_backward(view: View) -> list[CallSite]:
    return view.observed.calls.backwards[-1:]


def fix(view: View) -> str:
    """Divide the loss of each micro-batch."""
    return f"divide each loss by {micro_batches_of_a_rank(view)}, the number of micro-batches."


HYPOTHESIS = Hypothesis(
    name="accumulation_not_divided",
    sentence="The losses of the micro-batches were added up, not divided by their number.",
    look_at="the loss before backward: divide it there (loss / accumulation_steps)",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Use another number of micro-batches, not a multiple of the number of ranks.",
    headline="micro-batch losses are added, not divided",
    lines=lines,
    fix=fix,
)
