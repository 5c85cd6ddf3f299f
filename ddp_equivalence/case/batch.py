"""Takes a batch apart and puts it together: its leaves, its examples, and where they lie."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.case.batch_tree import (
    children,
    hidden_tensors,
    leaves_of,
    map_leaves,
    map_tensors,
)
from ddp_equivalence.case.errors import BadCase, Words, of_type

# Takes a batch apart: its examples, and where they lie in each leaf.
#
# By default the examples lie along dim 0 of every tensor, and every other leaf is carried whole.
# ``Case.batch_dims`` says so where it is otherwise.

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
    """The entry of the case for the leaf at this path, or for the innermost container around it."""
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


# Refuses a batch of which it is not clear where the examples lie, and names the leaf.

DEALING_FUNCTION = "batch_dims=a function (batch, indices) -> batch, with examples=their number"


def check_batch(batch: Any, dims: BatchDims, examples: int | None, exact: bool = False) -> int:
    """The number of examples. ``examples``: what the case says, if a function deals.

    Raises BadCase, which names the leaf, if a leaf cannot be dealt, if leaves hold different
    numbers of examples, or if a leaf may or may not have one entry for each example.
    """
    try:
        leaves = list(leaves_of(batch, entries_by_example(dims)))
        map_leaves(lambda path, leaf: leaf, batch)
    except Exception as error:
        right = "a batch whose containers can be made anew with other leaves, and do not hold "
        right += f"themselves; that raised {type(error).__name__}: {error}"
        raise BadCase("batch", of_type(batch), right) from error
    for path, leaf in leaves_of(batch):
        if (instead := _what_would_be_right(leaf, callable(dims), exact)) is not None:
            raise BadCase("batch", of_type(leaf), instead, at=path)
    if callable(dims):
        assert examples is not None
        _try_dealing(batch, dims)
        return examples
    _check_paths(batch, dims)
    lengths = dict(_lengths(leaves, dims))
    if not lengths:
        right = "a batch with at least one tensor in it; or with lists that have one entry for "
        right += "each example, and batch_dims={\"['name']\": 0, ...} to say so"
        raise BadCase("batch", of_type(batch), right)
    if len(set(lengths.values())) > 1:
        _refuse_lengths(batch, lengths)
    return next(iter(lengths.values()))


def check_that_it_is_clear(batch: Any, dims: BatchDims, count: int) -> None:
    """Raises BadCase for a leaf of which only its length suggests that it has an entry by example.

    ``count``: the number of examples. With one example there is nothing to deal.
    """
    if callable(dims) or count < 2:
        return
    for path, what in _unclear(batch, dims, count, ""):
        whole, by_example = _written(path, None), _written(path, 0)
        unclear = f"unclear, as it has {count} entries and the batch has {count} examples"
        right = f"named: {by_example} if each example has one of its entries, or "
        if what == "count":
            unclear = f"unclear, as it is {count} and the batch has {count} examples"
            right = f"left out of the batch, since a rank has fewer examples; or say {whole} if it "
            right += "is another number"
        elif what == "tensors":
            right += f"{_written(path + '[0]', 0)} (and so on) if each of its tensors has the "
            right += "examples along dim 0"
        else:
            right += f"{whole} if every rank has all of them"
        raise BadCase("batch", Words(unclear), right, at=path)


def _unclear(value: Any, dims: BatchDims, count: int, path: str) -> Iterator[tuple[str, str]]:
    """The paths of what may have one entry by example, with "count", "tensors" or "entries"."""
    said = said_of(path, dims)
    if isinstance(value, Tensor) or said is None or (said != UNSAID and isinstance(dims, Mapping)):
        return
    if isinstance(value, int) and not isinstance(value, bool) and value == count:
        yield path, "count"
    inside = children(value)
    if inside is None:
        if not isinstance(value, str | bytes | type) and _length(value) == count:
            yield path, "entries"
        return
    if path and _is_sequence(value) and len(value) == count:
        tensors = [leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor)]
        if not tensors:
            yield path, "entries"
            return
        if said == UNSAID and all(isinstance(one, Tensor) for one in value):
            yield path, "tensors"
    elif not path and _is_sequence(value) and len(value) == count > 2:
        kinds = {(one.dtype, one.ndim) if isinstance(one, Tensor) else None for one in value}
        if said == UNSAID and len(kinds) == 1 and None not in kinds:  # such as a list of images
            yield path, "tensors"
    for end, child in inside:
        yield from _unclear(child, dims, count, path + end)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | deque) and not hasattr(value, "_fields")


def _length(value: Any) -> int | None:
    if isinstance(value, set | frozenset | Mapping):
        return None
    try:
        return len(value)
    except Exception:  # it has no length, such as a number, an array without dims or a function
        return None


def _what_would_be_right(leaf: Any, dealt_by_function: bool, exact: bool) -> str | None:
    """Says what would be right where a leaf cannot be dealt or compared; None if it can."""
    if not isinstance(leaf, Tensor):
        if dealt_by_function or not hidden_tensors(leaf):
            return None
        return (
            "a dict or a dataclass: this one holds tensors that cannot be reached; or give "
            f"{DEALING_FUNCTION}"
        )
    if leaf.is_meta:
        return "a tensor on the CPU; this one is on the meta device, and has no values"
    if leaf.is_nested:
        return (
            "a list with one tensor for each example, which batch_dims says, and from which the "
            "loss makes the nested tensor: a nested tensor cannot be taken apart"
        )
    if leaf.is_quantized:
        return f"a tensor that is not quantized ({leaf.dtype}): quantize it in the loss"
    if leaf.layout not in (torch.strided, torch.sparse_coo):
        return (
            f"a strided or sparse_coo tensor instead of {leaf.layout}: "
            "convert it in the loss, for instance by to_sparse_csr()"
        )
    if exact and (leaf.layout is not torch.strided or leaf.is_complex()):
        return "a dense real tensor, since an exact case rounds its values to integers"
    return None


def _lengths(leaves: list[tuple[str, Any]], dims: BatchDims) -> Iterator[tuple[str, int]]:
    """How many examples each leaf holds that is dealt."""
    for path, leaf in leaves:
        dim = dim_of(path, leaf, dims)
        if dim is None:
            continue
        name = path or "batch"
        if isinstance(leaf, Tensor | np.ndarray):
            if dim >= leaf.ndim:
                has = f"this one has {'no dim' if not leaf.ndim else f'shape {tuple(leaf.shape)}'}"
                right = f"a tensor with examples along dim {dim}; {has}. "
                right += f"If every rank is to have it whole, say {_written(path, None)}"
                raise BadCase("batch", of_type(leaf), right, at=path)
            yield name, leaf.shape[dim]
        elif type(leaf) in (list, tuple) and dim == 0:
            yield name, len(leaf)
        else:
            right = "a dim of tensors and arrays, 0 for a list or tuple with one entry for each "
            right += f"example, or None; {name} is {type(leaf).__name__}"
            raise BadCase("batch_dims", dict(dims) if isinstance(dims, Mapping) else dims, right)


def _refuse_lengths(batch: Any, lengths: Mapping[str, int]) -> None:
    shown = ", ".join(f"{name}: {length}" for name, length in list(lengths.items())[:8])
    if len(lengths) > 8:
        shown += f", and {len(lengths) - 8} more"
    first = next(name for name in lengths if lengths[name] != next(iter(lengths.values())))
    path = first.rpartition("[")[0] if first.rpartition("[")[2].rstrip("]").isdigit() else first
    right = "made of leaves with equally many examples along dim 0; or say for a leaf along which "
    right += f"dim they lie, as in {_written(path, 1)}, that every rank has it whole (None), or "
    right += "that it is a list with one entry for each example (0)"
    raise BadCase("batch", Words(f"uneven ({shown})"), right)


def _check_paths(batch: Any, dims: BatchDims) -> None:
    """Every key of ``batch_dims`` must name a leaf or a container of the batch."""
    if not isinstance(dims, Mapping):
        return
    paths = [path for path, _ in leaves_of(batch)]
    known = {names_in(path)[:length] for path in paths for length in range(len(names_in(path)) + 1)}
    for key in dims:
        if names_in(key) not in known:
            some = ", ".join(path or '""' for path in paths[:8])
            raise BadCase("batch_dims", key, f"the path of a leaf of the batch, such as {some}")


def _try_dealing(batch: Any, dims: BatchDims) -> None:
    right = "a function (batch, indices) -> batch with only these examples"
    try:
        take(batch, [0], dims)
    except Exception as error:
        raised = f"{right}; it raised {type(error).__name__}: {error}"
        raise BadCase("batch_dims", getattr(dims, "__name__", "a function"), raised) from error


def _written(path: str, dim: int | None) -> str:
    """How the user writes this, such as ``batch_dims={"['rows']": None}``."""
    return f'batch_dims={{"{path}": {dim}}}'
