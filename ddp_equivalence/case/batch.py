"""Batches: pytrees whose tensor leaves hold the examples along dim 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_equivalence.case.errors import BadCase


def take(batch: Any, indices: Sequence[int]) -> Any:
    """The examples at ``indices``, in that order. Leaves that are no tensors stay as they are."""
    index = torch.as_tensor(list(indices), dtype=torch.long)

    def take_from(leaf: Tensor) -> Tensor:
        return leaf.index_select(0, index.to(leaf.device))

    return pytree.tree_map_only(Tensor, take_from, batch)


def concatenate(batches: Sequence[Any]) -> Any:
    """Join batches of the same structure along dim 0.

    Leaves that are no tensors are taken from the first batch.
    """
    leaves, spec = zip(*map(pytree.tree_flatten, batches), strict=True)
    joined = [
        torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
        for parts in zip(*leaves, strict=True)
    ]
    return pytree.tree_unflatten(joined, spec[0])


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor leaf on ``device``."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), batch)


def count_examples(batch: Any) -> int:
    """The number of examples: the length along dim 0, which all tensor leaves must share.

    Raises BadCase if the batch has no tensor, a tensor has no dim 0, or the lengths differ.
    """
    lengths = {
        pytree.keystr(path) or "batch": leaf.shape[0] if leaf.ndim else None
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
        if isinstance(leaf, Tensor)
    }
    if not lengths:
        raise BadCase("batch", type(batch).__name__, "a pytree with at least one tensor in it")
    if None in lengths.values():
        leaf = next(name for name, length in lengths.items() if length is None)
        raise BadCase("batch", leaf, "a tensor with examples along dim 0; this one has no dim")
    if len(set(lengths.values())) > 1:
        all_lengths = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise BadCase("batch", all_lengths, "leaves with equally many examples along dim 0")
    return int(next(iter(lengths.values())) or 0)
