"""Lets an observed script compute in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch_tree import leaves_of, map_tensors
from ddp_equivalence.observed_scripts.recorded_step import in_float64


def batch_in_float64(batch: Any) -> Any:
    """The batch with its floats in float64; the same object if they all are already."""
    tensors = (leaf for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor))
    if all(in_float64(tensor) is tensor for tensor in tensors):
        return batch
    return map_tensors(in_float64, batch)


def compute_in_float64() -> None:
    """New tensors are in float64, and so is a model before it is wrapped."""
    torch.set_default_dtype(torch.float64)
    from torch.nn.parallel import DistributedDataParallel

    initialise = DistributedDataParallel.__init__

    def wrapped(self: Any, module: nn.Module, *arguments: Any, **named: Any) -> None:
        initialise(self, module.double(), *arguments, **named)

    DistributedDataParallel.__init__ = wrapped  # type: ignore[method-assign]
