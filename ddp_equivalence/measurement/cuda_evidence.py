"""What a rank on CUDA says of its run beside gradients: its GPUs, and the precision of float32."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.ranks.float32_precision import TF32_OVERRIDE, torchs_precision
from ddp_equivalence.ranks.physical_gpu import gpus_of
from ddp_equivalence.ranks.rank import Rank


@dataclass(frozen=True)
class Tf32:
    """Whether TF32, which keeps 10 bits of float32's mantissa, was allowed in float32 on a rank."""

    products: bool
    convolutions: bool


def gpus_used(
    rank: Rank, tensors: Iterable[Tensor | None], notes: Mapping[str, Any] | None = None
) -> str:
    """The physical GPUs that hold these tensors, and those that a strategy noted; "" on the CPU.

    ``tensors``: the weights and gradients that the step left. A step that moves them to another GPU
    than its rank's is seen by this. One that only computes there is not.
    """
    if rank.device.type != "cuda":
        return ""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    devices |= {torch.device(name) for name in (notes or {}).get("devices", ())}
    return gpus_of(devices) or gpus_of([rank.device])


def tf32_of(rank: Rank) -> Tf32 | None:
    """Whether TF32 is allowed now; None on the CPU, which has no TF32 of this kind."""
    if rank.device.type != "cuda":
        return None
    if os.environ.get(TF32_OVERRIDE) == "0" and torch.version.hip is None:
        return Tf32(products=False, convolutions=False)
    products, convolutions = torchs_precision()
    return Tf32(products=products == "tf32", convolutions=convolutions == "tf32")
