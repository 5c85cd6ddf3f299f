"""Tensors that know their device, so that mixing devices raises as on CUDA."""

from __future__ import annotations

from torch import Tensor


def install() -> None:
    """Give every tensor of a rank its device."""
    raise NotImplementedError("PRETEND_STRICT")


def copy_to(tensor: Tensor, index: int) -> Tensor:
    """A copy of the tensor on a device; index -1 is the CPU."""
    raise NotImplementedError("PRETEND_STRICT")
