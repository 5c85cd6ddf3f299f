"""Marks that tell whether a module returns the same in two processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

MOST_ELEMENTS = 1 << 16
"""Of a larger tensor only so many elements are looked at, so that a mark takes little time."""


def mark_of(result: Any) -> float:
    """A number that tells what a module returned from nearly everything else, also from the same
    elements in another order; NaN if it returned no dense floats.
    """
    total, place = 0.0, 0
    tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
    with _disable_current_modes(), torch.no_grad():  # nobody logs or nudges this
        for flat in (one.reshape(-1) for one in tensors if _is_plain(one)):
            taken = flat[:: len(flat) // MOST_ELEMENTS + 1].double()
            places = torch.arange(place, place + len(taken), device=taken.device).double()
            total += float(taken @ torch.cos(places * places.sqrt()))
            place += len(taken)
    return total if place else math.nan


def _is_plain(tensor: Tensor) -> bool:
    """Dense, not sharded, and not empty."""
    is_dense = tensor.layout is torch.strided and not hasattr(tensor, "full_tensor")
    return is_dense and tensor.is_floating_point() and tensor.numel() > 0
