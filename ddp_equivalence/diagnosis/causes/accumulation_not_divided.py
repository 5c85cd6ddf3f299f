"""Losses of micro-batches were added up and not divided by their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if view.parts is None or view.is_sum() or all(len(one) == 1 for one in view.parts):
        return ()
    rows = [torch.stack([view.gradient(p) for p in of_rank]).sum(0) for of_rank in view.parts]
    most = max(map(len, view.parts))
    return (Way(view.everywhere(torch.stack(rows).mean(0)), f"{most} micro-batches in the window"),)


def factors(view: View) -> Sequence[Factor]:
    count = view.micro_batches
    if count is None or count == 1 or view.is_sum():
        return ()
    return (Factor(count, f"times the {count} micro-batches of the window"),)


def sign(view: View) -> Sign | None:
    found, count = indications.loss_factor(view), view.micro_batches
    if found is None or count in (None, 1):
        return None
    if indications.close(found, 1.0):
        return Sign(True, "every backward began at the whole mean of its own micro-batch")
    return Sign(False, "the losses of the micro-batches were divided") if found < 0.9 else None


HYPOTHESIS = Hypothesis(
    name="accumulation_not_divided",
    sentence="The losses of the micro-batches were added up, not divided by their number.",
    look_at="loss / accumulation_steps before backward",
    predict=predict,
    factors=factors,
    sign=sign,
    tell_apart="another number of micro-batches, which is no multiple of the ranks",
)
