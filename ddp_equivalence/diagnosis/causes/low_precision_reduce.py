"""Gradients were reduced in a narrower type than they have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View

NARROWER = (torch.bfloat16, torch.float16, torch.float32)

MOST = 8.0
"""In eps of the narrower type: a smooth error is no larger, relative to the norm."""

ENOUGH = 0.99
"""The share of the elements that must be values of the narrower type."""


def predict(view: View) -> Sequence[Way]:
    dtype = view.dtype
    if not bool(view.measured.isfinite().all()) or not bool(view.measured.any()):
        return ()
    error = float((view.measured - view.expected).norm() / view.measured.norm())
    for narrow in NARROWER:
        if torch.finfo(narrow).eps <= torch.finfo(dtype).eps:
            continue
        if error > MOST * torch.finfo(narrow).eps * view.world_size:
            continue
        for times in (1, view.world_size):
            values = view.measured * times
            rounded = values.to(narrow).double()
            # Rounded to the case's own type after a division.
            there = (rounded - values).abs() <= 4 * torch.finfo(dtype).eps * values.abs()
            if float(there.double().mean()) >= ENOUGH:
                name = str(narrow).removeprefix("torch.")
                # No rounding can be predicted; that all values are of this type explains it.
                return (Way(view.measured, f"every value is one of {name}", informed=True),)
    return ()


def sign(view: View) -> Sign | None:
    logs = [seen.collectives or () for seen in view.observed.values()]
    sent = {one.dtype for log in logs for one in log if "reduce" in one.op and one.elements > 1}
    narrow = sorted(name for name in sent if name in ("Half", "BFloat16", "c10::Half"))
    if narrow:
        return Sign(True, f"a reduction ran in {', '.join(narrow)}")
    return None


HYPOTHESIS = Hypothesis(
    name="low_precision_reduce",
    sentence="Gradients were reduced in a narrower type than they have: the error is smooth and of "
    "the size of its rounding.",
    look_at="a compression hook (fp16_compress_hook, bf16_compress_hook), mixed_precision's "
    "reduce_dtype, or a cast around all_reduce",
    predict=predict,
    sign=sign,
    tell_apart="the same case in the narrower type, where it goes away",
)
