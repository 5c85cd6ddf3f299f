"""Finds the plain tensors in the arguments of a call, however they are packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch_tree import attributes_of
from ddp_equivalence.measurement.flat_parameters import is_flattened

DEEPEST = 4
MOST_OPENED = 200
"""So many objects are opened, down to this depth."""


class NotPlain(Exception):
    """A tensor has no values of its own in memory, so nothing can be said of its values."""


def tensors_in(arguments: object) -> list[Tensor]:
    """All tensors, in a fixed order; also those in dataclasses, mappings and other objects.

    Raises NotPlain if the values of one are not known.
    """
    return [plain(leaf) for leaf in leaves_of(arguments) if isinstance(leaf, Tensor)]


def leaves_of(arguments: object) -> Iterator[object]:
    """The leaves of a pytree. Objects that are no pytrees are opened too."""
    seen: set[int] = set()

    def opened(value: object, depth: int) -> Iterator[object]:
        for leaf in pytree.tree_leaves(value):
            inside = None if isinstance(leaf, Tensor) else _inside(leaf)
            if inside is None or depth >= DEEPEST:
                yield leaf
            elif id(leaf) not in seen and len(seen) < MOST_OPENED:
                seen.add(id(leaf))
                yield from opened(inside, depth + 1)

    return opened(arguments, 0)


def _inside(leaf: object) -> list[Any] | None:
    """What an object holds; None if it is not opened."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    if type(leaf).__module__ in ("builtins", "torch") or isinstance(leaf, type | nn.Module):
        return None
    return list(attributes_of(leaf).values()) or None


def plain(tensor: Tensor) -> Tensor:
    """The tensor without the wrapper that torch.func puts around it while it transforms.

    Raises NotPlain for a tensor that a compiler traces, for one that is sharded, nested, quantized
    or on the meta device.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        batched = torch._C._functorch.is_batchedtensor(tensor)
        dim = torch._C._functorch.maybe_get_bdim(tensor) if batched else 0
        tensor = torch._C._functorch.get_unwrapped(tensor)
        tensor = tensor.movedim(dim, 0) if dim > 0 else tensor
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or is_flattened(tensor):
        raise NotPlain(type(tensor).__name__)
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise NotPlain(str(tensor.layout))
    return tensor if type(tensor) is Tensor else tensor.detach().as_subclass(Tensor)
