"""The precision of a case: which tensors of a batch are cast to it, and to which dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
