"""Takes a batch apart: its examples, and where they lie in each leaf.

By default the examples lie along dim 0 of every tensor, and every other leaf is carried whole.
``Case.batch_dims`` says so where it is otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.case.batch_tree import leaves_of, map_leaves, map_tensors

Deal = Callable[[Any, list[int]], Any]
"""A function (batch, indices) -> a batch of the same kind with only these examples, in order."""

BatchDims = int | Mapping[str, int | None] | Deal | None
"""Where the examples lie: one dim for all tensors; or, by the path of a leaf, its dim (0 for a list
with one entry per example), or None for a leaf that is carried whole; or a function that deals."""

UNSAID = -1
"""The dim of a leaf of which the case says nothing."""


def take(batch: Any, indices: Sequence[int], dims: BatchDims = None) -> Any:
    """The examples at ``indices``, in that order. Leaves that are carried whole stay the same."""
    if callable(dims):
        return dims(batch, list(indices))
    index = torch.as_tensor(list(indices), dtype=torch.long)

    def take_from(path: str, leaf: Any) -> Any:
        dim = dim_of(path, leaf, dims)
        if dim is None:
            return leaf
        if isinstance(leaf, Tensor):
            taken = leaf.detach().index_select(dim, index.to(leaf.device))
            return taken.requires_grad_() if leaf.requires_grad else taken
        if isinstance(leaf, np.ndarray):
            return leaf.take(index.numpy(), axis=dim)
        return type(leaf)(leaf[place] for place in indices)

    return map_leaves(take_from, batch, entries_by_example(dims))


def dim_of(path: str, leaf: Any, dims: BatchDims) -> int | None:
    """The dim along which a leaf holds the examples; None if it is carried whole."""
    said = said_of(path, dims)
    if said == UNSAID or isinstance(dims, int):
        return (0 if said == UNSAID else said) if isinstance(leaf, Tensor) else None
    return said


def said_of(path: str, dims: BatchDims) -> int | None:
    """What the case says of the leaf at this path, or of the innermost container around it."""
    if isinstance(dims, int):
        return dims
    if not isinstance(dims, Mapping):
        return UNSAID
    names = names_in(path)
    for length in range(len(names), -1, -1):
        for key, dim in dims.items():
            if names_in(key) == names[:length]:
                return dim
    return UNSAID


def entries_by_example(dims: BatchDims) -> Callable[[str, Any], bool] | None:
    """Tells which lists and tuples have one entry for each example, and are leaves as a whole."""
    if not isinstance(dims, Mapping):
        return None
    named = {names_in(key) for key, dim in dims.items() if dim is not None}

    def is_named(path: str, value: Any) -> bool:
        return type(value) in (list, tuple) and names_in(path) in named

    return is_named


def names_in(path: str) -> tuple[str, ...]:
    """The keys in a path: ``['image']['size']`` and ``image.size`` have the same ones."""
    return tuple(re.findall(r"[^\[\]'\".]+", path))


def count_examples(batch: Any, dims: BatchDims = None) -> int:
    """The number of examples, as the first leaf that holds some says."""
    for path, leaf in leaves_of(batch, entries_by_example(dims)):
        dim = dim_of(path, leaf, dims)
        if dim is not None:
            return leaf.shape[dim] if isinstance(leaf, Tensor | np.ndarray) else len(leaf)
    raise ValueError("no leaf of the batch holds examples")


def concatenate(batches: Sequence[Any]) -> Any:
    """Join batches of the same structure along dim 0.

    Leaves that are no tensors are taken from the first batch.
    """
    rest = [[leaf for _, leaf in leaves_of(batch)] for batch in batches]
    parts = iter(list(zip(*rest, strict=True)))

    def join(path: str, leaf: Any) -> Any:
        of_leaf = next(parts)
        return torch.cat(of_leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(join, batches[0])


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor leaf on ``device``."""

    def moved(leaf: Tensor) -> Tensor:
        on_device = leaf.to(device)
        if on_device is leaf or not leaf.requires_grad:
            return on_device
        return on_device.detach().requires_grad_()

    return map_tensors(moved, batch)
