"""Lets an observed script compute in float64."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch_tree import leaves_of, map_tensors
from ddp_equivalence.observed_scripts.in_script.names import named_tensors
from ddp_equivalence.observed_scripts.recorded_step import in_float64
from ddp_equivalence.ranks.torch_frames import counts_as_torch

RANKS = 2
"""So many ranks are assumed on this machine, if the launcher does not say how many there are."""

BYTES_PER_ELEMENT = 8 * 3
"""What training takes in float64: the weight, its gradient, and its place in DDP's bucket."""


def batch_in_float64(batch: Any) -> Any:
    """The batch with its floats in float64; the same object if they all are already."""
    tensors = (leaf for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor))
    if all(in_float64(tensor) is tensor for tensor in tensors):
        return batch
    return map_tensors(in_float64, batch)


def to_float64(module: nn.Module) -> None:
    """Convert the module, if it has floats of less than float64."""
    if any(in_float64(tensor) is not tensor for _, tensor in named_tensors(module)):
        module.double()


def compute_in_float64() -> None:
    """New tensors are in float64, and so is a model before it is wrapped.

    A model that does not fit into the memory in float64 makes the script end with a MemoryError.
    """
    torch.set_default_dtype(torch.float64)
    require_memory()
    from torch.nn.parallel import DistributedDataParallel

    initialise = DistributedDataParallel.__init__

    def wrapped(self: Any, module: nn.Module, *arguments: Any, **named: Any) -> None:
        initialise(self, module.double(), *arguments, **named)

    DistributedDataParallel.__init__ = wrapped  # type: ignore[method-assign]


def require_memory() -> None:
    """Raise MemoryError as soon as the parameters that were made do not fit on all ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or RANKS)
    most = psutil.virtual_memory().available / (ranks * BYTES_PER_ELEMENT)
    register = nn.Module.register_parameter
    made = 0

    @counts_as_torch
    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal made
        register(self, name, param)
        if param is not None and param.device.type == "cpu":
            made += param.numel()
            if made > most:
                raise MemoryError(f"{made:,} parameters do not fit into the memory in float64")

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
