"""The precision of a case: which tensors of its batch and model are cast, and to which dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

COMPLEX: Mapping[torch.dtype | None, torch.dtype] = {
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
"""The complex dtype of each precision. In the others, complex tensors keep their own."""


def cast(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A floating-point or complex tensor in this precision; others, and all with None, stay."""
    if dtype is not None and leaf.is_floating_point():
        return leaf.to(dtype)
    if dtype in COMPLEX and leaf.is_complex():
        return leaf.to(COMPLEX[dtype])
    return leaf


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a real model, in place; complex buffers, such as rotary embeddings, stay complex.

    ``model.to(dtype)`` would discard their imaginary parts.
    """
    complex_buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_complex()
    ]
    for module, name, _ in complex_buffers:
        setattr(module, name, None)
    model.to(dtype)
    for module, name, buffer in complex_buffers:
        setattr(module, name, cast(buffer, dtype))
    return model
