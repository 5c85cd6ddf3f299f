"""Sees into a batch: the leaves of nested containers, and the same containers with other leaves.

Containers are what torch's pytree knows (dicts, lists, tuples, named tuples, deques, and types that
the user has registered), and also dict subclasses, UserDict (transformers' BatchEncoding), list
subclasses, dataclasses, and objects that hold tensors in their attributes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Node = tuple[tuple[str, Any], ...]
"""The children of a container: the end of each one's path, such as ``['rows']``, and itself."""

PLAIN = (Tensor, str, bytes, int, float, complex, type(None), np.ndarray, np.generic, torch.Size)
"""Types that are never containers."""

_LEAVES = (*PLAIN, type)


def map_leaves(
    visit: Callable[[str, Any], Any],
    batch: Any,
    is_leaf: Callable[[str, Any], bool] | None = None,
    path: str = "",
) -> Any:
    """The batch with ``visit(path, leaf)`` in the place of every leaf.

    ``is_leaf(path, value)`` is True for a container that is to be visited as a whole.
    """
    if is_leaf is not None and is_leaf(path, batch):
        return visit(path, batch)
    if type(batch) is dict:
        return {
            key: map_leaves(visit, value, is_leaf, f"{path}[{key!r}]")
            for key, value in batch.items()
        }
    if type(batch) is list or type(batch) is tuple:
        return type(batch)(
            map_leaves(visit, value, is_leaf, f"{path}[{place}]")
            for place, value in enumerate(batch)
        )
    node = children(batch)
    if node is None:
        return visit(path, batch)
    values = [map_leaves(visit, value, is_leaf, path + end) for end, value in node]
    return _rebuilt(batch, node, values)


def map_tensors(change: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with ``change(tensor)`` in the place of every tensor."""
    return map_leaves(lambda path, leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def leaves_of(
    batch: Any, is_leaf: Callable[[str, Any], bool] | None = None, path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; the path of a batch that is a single leaf is empty."""
    node = None if is_leaf is not None and is_leaf(path, batch) else children(batch)
    if node is None:
        yield path, batch
        return
    for end, value in node:
        yield from leaves_of(value, is_leaf, path + end)


def name_of_leaf(path: str) -> str:
    """The path of a leaf as a report names it: ``['mask']`` is "mask", and ``[1]`` is "entry 1 of
    the batch".
    """
    name = path.strip("[]'.")
    return f"entry {name} of the batch" if name.isdecimal() else name or "the batch"


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors among the leaves."""
    return [leaf for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def children(value: Any) -> Node | None:
    """The children of a container; None if the value is a leaf."""
    if isinstance(value, _LEAVES):
        return None
    if type(value) is dict:
        return tuple((f"[{key!r}]", child) for key, child in value.items())
    if type(value) is list or type(value) is tuple:
        return tuple((f"[{place}]", child) for place, child in enumerate(value))
    if (node := _pytree_children(value)) is not None:
        return node
    if isinstance(value, dict | UserDict):
        return tuple((f"[{key!r}]", child) for key, child in value.items())
    if isinstance(value, list):
        return tuple((f"[{place}]", child) for place, child in enumerate(value))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return tuple((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
    if callable(value):  # such as a module, whose tensors are no examples
        return None
    attributes = attributes_of(value)
    seen = {id(value)}
    if any(True for one in attributes.values() for _ in _tensors_in(one, seen)):
        return tuple((f".{name}", one) for name, one in attributes.items())
    return None


def _pytree_children(value: Any) -> Node | None:
    def is_inside(one: Any) -> bool:
        return one is not value

    values, _ = pytree.tree_flatten(value, is_leaf=is_inside)
    if len(values) == 1 and values[0] is value:
        return None
    try:
        with_paths = pytree.tree_flatten_with_path(value, is_leaf=is_inside)[0]
    except (ValueError, AttributeError):  # a type that was registered without the names of its keys
        return tuple((f"[{place}]", child) for place, child in enumerate(values))
    return tuple((pytree.keystr(path), child) for path, child in with_paths)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object itself holds, in its ``__dict__`` or in slots."""
    slots = [
        name
        for kind in type(value).__mro__
        for name in _slot_names(kind)
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]
    held = getattr(value, "__dict__", {})
    return {name: getattr(value, name) for name in slots} | dict(held)


def _slot_names(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def hidden_tensors(leaf: Any) -> list[Tensor]:
    """The tensors that a leaf which is no tensor holds all the same, such as a set of tensors."""
    return [] if isinstance(leaf, Tensor) else list(_tensors_in(leaf, set()))


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    if isinstance(value, PLAIN) or callable(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    else:
        inside = list(attributes_of(value).values())
    for one in inside:
        yield from _tensors_in(one, seen)


def _rebuilt(value: Any, node: Node, values: list[Any]) -> Any:
    """The container with other children. Attributes that are no children stay as they are."""
    if _pytree_children(value) is not None:
        spec = pytree.tree_flatten(value, is_leaf=lambda one: one is not value)[1]
        return pytree.tree_unflatten(values, spec)
    new = copy.copy(value)
    if isinstance(value, dict | UserDict):
        for key, child in zip(value, values, strict=True):
            new[key] = child
    elif isinstance(value, list):
        new[:] = values
    else:
        for (end, _), child in zip(node, values, strict=True):
            object.__setattr__(new, end.removeprefix("."), child)
    return new
