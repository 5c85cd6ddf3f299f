"""Each rank clipped its own gradient before the average."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnoses import signs
from ddp_equivalence.diagnoses.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnoses.view import View

AGREE = 1e-3
"""Norms after clipping that agree within this are tried as one max_norm."""


def predict(view: View) -> Sequence[Way]:
    weights = view.weights
    if weights is None or view.world_size == 1 or not view.selection.is_whole:
        return ()
    found = view.owns[0]
    ways = []
    for divisor in (view.world_size, 1):
        kept = weights[0] * divisor  # what each rank's gradient was multiplied by
        norms = found.norm(dim=1)
        clipped = kept < 1 - AGREE
        if not bool(clipped.any()) or bool((kept <= 0).any()):
            continue
        limits = (kept * norms)[clipped]
        limit = limits.mean()
        if float((limits - limit).abs().max()) > AGREE * float(limit):
            continue
        # clip_grad_norm_ adds 1e-6 to the norm.
        factor = torch.clamp(limit / norms, max=1.0)
        exact = torch.where(clipped, kept, torch.ones_like(kept))
        if bool((factor[~clipped] < 1 - AGREE).any()):
            continue
        held = (exact[:, None] * found).sum(0) / divisor
        ranks = torch.nonzero(clipped).flatten().tolist()
        ways.append(Way(view.everywhere(held), f"{signs.listed(ranks)} to a norm of {limit:.3g}"))
    return tuple(ways)


def sign(view: View) -> Sign | None:
    calls = [call for seen in view.observed.values() for call in seen.clipped]
    if not calls:
        return None
    return Sign(True, f"clip_grad_norm_ was called with max_norm {calls[0][0]:g}")


HYPOTHESIS = Hypothesis(
    name="clipped_before_reduce",
    sentence="Each rank clipped the norm of its own gradient, and the clipped ones were averaged.",
    look_at="clip_grad_norm_ before the all_reduce, or inside a communication hook: clip after it",
    predict=predict,
    sign=sign,
    tell_apart="a max_norm that bites on some ranks only",
)
