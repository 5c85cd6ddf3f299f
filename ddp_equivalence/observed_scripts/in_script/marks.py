"""Marks that tell whether a module returns the same in two processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CHUNK = 1 << 20
"""So many elements are looked at together, in float64."""


def mark_of(result: Any) -> float:
    """A number that tells what a module returned from nearly everything else, also from the same
    elements in another order; NaN if it returned no floats.
    """
    tensors = (one for one in pytree.tree_leaves(result) if isinstance(one, Tensor))
    whole = (one for one in tensors if not hasattr(one, "full_tensor"))  # none that is sharded
    floats = [one.detach().reshape(-1) for one in whole if one.is_floating_point()]
    total, place = 0.0, 0
    for flat in floats:
        for chunk in flat.split(CHUNK):
            places = torch.arange(place, place + len(chunk), device=chunk.device)
            weights = torch.cos(places.double() * places.double().sqrt())
            total += float(chunk.double() @ weights)
            place += len(chunk)
    return total if floats else math.nan
