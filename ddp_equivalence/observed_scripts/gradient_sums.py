"""How far gradients are from weighted sums of others, over all parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.observed_scripts.as_case import BEFORE_CLIP, OWN, Kind, ObservedStep

ROUNDING_IN_LOW_PRECISION = 1e-3
"""What may be off below float64, relative to the norm: thousands of eps of float32. Gradients in
bfloat16 and float16 round more than this, so that nothing is said of them.
"""

Gradients = Mapping[str, Tensor | None]


def rounding_of(gradients: Gradients) -> float:
    """What may be off where gradients of this precision are compared, relative to the norm."""
    dtypes = {gradient.dtype for gradient in gradients.values() if gradient is not None}
    return NEGLIGIBLE if dtypes <= {torch.float64} else ROUNDING_IN_LOW_PRECISION


def distance(terms: Sequence[tuple[float, Gradients]]) -> float:
    """The norm of the weighted sum, relative to that of the first term."""
    square = norm = 0.0
    for name in dict.fromkeys(name for _, gradients in terms for name in gradients):
        weighted = [
            weight * one.double() for weight, of in terms if (one := of.get(name)) is not None
        ]
        if weighted:
            square += float(torch.stack(weighted).sum(0).square().sum())
        first = terms[0][1].get(name)
        norm += 0.0 if first is None else float(first.double().square().sum())
    return float((square / norm) ** 0.5) if norm else float(square > 0)


def left_over(together: Gradients, parts: Sequence[Gradients]) -> float:
    """What no mixture of the parts explains, relative to the norm of the whole; 1 if that is zero,
    which shows nothing.
    """
    all_of_them = [together, *parts]
    products = torch.zeros(len(all_of_them), len(all_of_them), dtype=torch.float64)
    for name in dict.fromkeys(name for one in all_of_them for name in one):
        gradients = [one.get(name) for one in all_of_them]
        shape = next((one.shape for one in gradients if one is not None), None)
        if shape is None:
            continue
        rows = torch.stack(
            [
                torch.zeros(shape, dtype=torch.float64) if one is None else one.double()
                for one in gradients
            ]
        ).reshape(len(gradients), -1)
        products += rows @ rows.T
    of_parts, with_whole = products[1:, 1:], products[1:, 0]
    weights = torch.linalg.lstsq(of_parts, with_whole.unsqueeze(1)).solution.squeeze(1)
    left = products[0, 0] - 2 * weights @ with_whole + weights @ of_parts @ weights
    return float((left.clamp(min=0) / products[0, 0]).sqrt()) if products[0, 0] > 0 else 1.0


def holds_the_mean_of_own(step: ObservedStep, more: Kind | None = None) -> bool:
    """True if every rank holds the mean of what the ranks computed. ``more``: a kind of gradients
    that is added to each rank's own.
    """
    ranks = range(step.record.world_size)
    kinds = (OWN, more) if more else (OWN,)
    computed = [step.gradients(rank, kind) for rank in ranks for kind in kinds]
    terms = [(-1.0 / len(ranks), one) for one in computed]
    held = [step.gradients(rank, BEFORE_CLIP) for rank in ranks]
    return all(distance([(1.0, one), *terms]) <= rounding_of(one) for one in held)
