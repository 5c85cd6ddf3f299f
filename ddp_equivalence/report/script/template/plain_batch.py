"""A batch with examples along dim 0 of every tensor, which torch's pytree can take apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def take(batch: Any, indices: Sequence[int]) -> Any:
    """The examples at ``indices``, in that order."""
    return map_tensors(lambda leaf: leaf[list(indices)], batch)


def move(batch: Any, device: torch.device) -> Any:
    return map_tensors(lambda leaf: leaf.to(device), batch)


def map_tensors(change: Callable[[Tensor], Any], batch: Any) -> Any:
    return pytree.tree_map_only(Tensor, change, batch)


def concatenate(batches: Sequence[Any]) -> Any:
    """Join batches of the same structure along dim 0."""
    leaves, spec = zip(*map(pytree.tree_flatten, batches), strict=True)
    joined = [
        torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
        for parts in zip(*leaves, strict=True)
    ]
    return pytree.tree_unflatten(joined, spec[0])
