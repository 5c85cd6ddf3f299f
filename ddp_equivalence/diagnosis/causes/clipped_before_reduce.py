"""Each rank clipped its own gradient before the average."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View

AGREE = 1e-3
"""Norms after clipping that agree within this are tried as one max_norm."""

ADDED_TO_NORM = (1e-6, 0.0)
"""By torch's clip_grad_norm_, and by one written out."""


def predict(view: View) -> Sequence[Way]:
    weights = view.weights
    if weights is None or view.world_size == 1 or not view.selection.is_whole:
        return ()
    own = view.owns[0]
    norms = own.norm(dim=1)
    ways = []
    for divisor, added in product((view.world_size, 1), ADDED_TO_NORM):
        kept = weights[0] * divisor  # what each rank's gradient was multiplied by
        clipped = kept < 1 - AGREE
        if not bool(clipped.any()) or bool((kept <= 0).any()):
            continue
        limits = (kept * (norms + added))[clipped]
        max_norm = limits.mean()
        if float((limits - max_norm).abs().max()) > AGREE * float(max_norm):
            continue
        factors = torch.clamp(max_norm / (norms + added), max=1.0)
        if bool((factors[~clipped] < 1 - AGREE).any()):
            continue
        ranks = indications.listed(torch.nonzero(clipped).flatten().tolist())
        held = view.everywhere((factors[:, None] * own).sum(0) / divisor)
        ways.append(Way(held, f"{ranks} to a norm of {max_norm:.3g}"))
    return tuple(ways)


def sign(view: View) -> Sign | None:
    calls = [call for seen in view.observed.values() for call in seen.clipped]
    if not calls:
        return None
    return Sign(True, f"clip_grad_norm_ was called with max_norm {calls[0]:g}")


HYPOTHESIS = Hypothesis(
    name="clipped_before_reduce",
    sentence="Each rank clipped the norm of its own gradient, and the clipped ones were averaged.",
    look_at="clip_grad_norm_ before the all_reduce, or inside a communication hook: clip after it",
    predict=predict,
    sign=sign,
    tell_apart="a max_norm that bites on some ranks only",
)
