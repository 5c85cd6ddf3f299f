"""Recognises the examples of the big batch in the tensors that a model is called with.

A tensor that shares its memory with the tensors that the rank was given has rows that are known
without doubt. Other tensors are recognised by their values: as rows of the batch, in another shape,
order of dimensions or dtype, in part, or after an affine change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from ddp_equivalence.case import batch_tree
from ddp_equivalence.case.batch import BatchDims, dim_of, entries_by_example
from ddp_equivalence.measurement.observation import Indices, RowsRead
from ddp_equivalence.measurement.plain_tensors import NotPlain, leaves_of, plain
from ddp_equivalence.measurement.row_matching import (
    Candidates,
    affine_rows,
    bits_of_a_value,
    bytes_of_rows,
    equal_rows,
)

MOST_EXAMPLES = 4096
"""Examples are not looked up in a larger batch."""

MOST_ELEMENTS = 16_000_000
"""Nor in a tensor with more elements."""

MOST_BLOCKS = 256
"""Parts of rows are looked for at this many places in a row at most."""

MOST_FAILURES = 4
"""Tensors of a shape that was not recognised so often are not looked up again."""

FIRST, LAST = "first columns", "last columns"
"""Where a row of the batch may be, if it was joined with other columns."""


@dataclass(frozen=True)
class Given:
    """A tensor that the rank was given. ``positions``: the place of its rows in the big batch."""

    tensor: Tensor
    positions: Indices
    version: int


class ExampleLookup:
    """Finds the positions, in the big batch, of the rows that a model is called with.

    ``batch``: the big batch. ``given``: what the rank was given in each step, and the positions of
    its rows. ``dims``: where the batch holds its examples.
    """

    def __init__(
        self,
        batch: object,
        given: Sequence[tuple[object, Indices]] = (),
        dims: BatchDims = None,
    ) -> None:
        self._given = [
            Given(leaf, positions, leaf._version)
            for one, positions in given
            for leaf, dim in _leaves_with_examples(one, dims)
            if dim == 0 and len(leaf) == len(positions) and leaf.is_contiguous()
        ]
        leaves = _leaves_with_examples(batch, dims)
        rows = [_Rows(leaf.detach().cpu().movedim(dim, 0), dim) for leaf, dim in leaves]
        # The leaf with the largest rows comes first: small rows, such as labels, are often alike.
        self._leaves = sorted(
            (one for one in rows if 0 < len(one.leaf) <= MOST_EXAMPLES),
            key=lambda one: -one.leaf[:1].numel() * one.leaf.element_size(),
        )
        self._bits = [bits_of_a_value(one.leaf) for one in self._leaves]
        self._all_are_rows = len(self._leaves) == _count_of_leaves(batch, dims)
        self._failures: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()

    def rows_of(self, arguments: object) -> RowsRead | None:
        """The rows that these arguments hold; None if no tensor holds nothing but such rows."""
        tensors = _tensors(arguments)
        known = [rows for tensor in tensors if (rows := self._by_memory(tensor)) is not None]
        if not known:
            known = [rows for tensor in tensors if (rows := self._by_value(tensor)) is not None]
            # A tensor whose rows fit several examples says nothing beside one whose rows do not.
            known = [rows for rows in known if rows.is_certain] or known[:1]
        if not known:
            return None
        if len({rows.candidates for rows in known}) == 1:
            return known[0]
        every_row = dict.fromkeys(row for rows in known for row in rows.candidates)
        return RowsRead(tuple(every_row), known[0].part)

    def equal_examples(self) -> tuple[Indices, ...]:
        """Groups of examples that are equal in every tensor of the batch."""
        if not self._all_are_rows or not self._leaves:
            return ()
        columns = [bytes_of_rows(one.leaf.reshape(len(one.leaf), -1)) for one in self._leaves]
        groups: dict[tuple[bytes, ...], list[int]] = {}
        for index, example in enumerate(zip(*columns, strict=True)):
            groups.setdefault(example, []).append(index)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def _by_memory(self, tensor: Tensor) -> RowsRead | None:
        """The rows of a view of a tensor that the rank was given, and has not changed since."""
        for given in self._given:
            leaf = given.tensor
            memory = leaf.untyped_storage().data_ptr()
            same = tensor.dtype == leaf.dtype and tensor.untyped_storage().data_ptr() == memory
            if not same or not memory or leaf._version != given.version:
                continue
            views = [tensor] if tensor.ndim < 2 else [tensor, tensor.transpose(0, 1)]
            for view in views:
                rows = _rows_in_memory(view, leaf)
                if rows is not None:
                    places, part = rows
                    return RowsRead(tuple((given.positions[row],) for row in places), part)
        return None

    def _by_value(self, tensor: Tensor) -> RowsRead | None:
        kind = tuple(tensor.shape), tensor.dtype
        if not tensor.numel() or tensor.numel() > MOST_ELEMENTS:
            return None
        if tensor.is_complex() or self._failures[kind] >= MOST_FAILURES:
            return None
        values = tensor.detach().cpu()
        is_row = values.ndim < 2 or 1 in values.shape[:2]
        views = [values] if is_row else [values, values.transpose(0, 1)]
        for one, bits in zip(self._leaves, self._bits, strict=True):
            further = [values.movedim(one.dim, 0)] if 1 < one.dim < values.ndim else []
            for view in (*further, *views):
                found = _found_in(one.leaf, bits, view)
                if found is not None:
                    return found
        self._failures[kind] += 1
        return None


@dataclass(frozen=True)
class _Rows:
    """A tensor of the batch, with the examples along dim 0, and the dim that they had before."""

    leaf: Tensor
    dim: int


def _leaves_with_examples(batch: object, dims: BatchDims) -> list[tuple[Tensor, int]]:
    """The tensors of a batch that hold examples, and along which dim they do."""
    found = []
    where = None if callable(dims) else dims
    for path, leaf in batch_tree.leaves_of(batch, entries_by_example(dims)):
        dim = dim_of(path, leaf, where)
        if dim is not None and isinstance(leaf, Tensor):
            found += [(tensor, dim) for tensor in _tensors(leaf) if tensor.ndim > dim]
    return found


def _count_of_leaves(batch: object, dims: BatchDims) -> int:
    """How many leaves say how examples differ from each other."""
    where = None if callable(dims) else dims
    leaves = batch_tree.leaves_of(batch, entries_by_example(dims))
    return sum(
        isinstance(leaf, Tensor) or dim_of(path, leaf, where) is not None for path, leaf in leaves
    )


def _tensors(arguments: object) -> list[Tensor]:
    """The tensors that have rows and values: not those that a transform or a compiler traces."""
    found = []
    for leaf in leaves_of(arguments):
        with suppress(NotPlain):
            tensor = plain(leaf) if isinstance(leaf, Tensor) else None
            if tensor is not None and tensor.ndim and tensor.layout == torch.strided:
                found.append(tensor)
    return found


def _rows_in_memory(view: Tensor, leaf: Tensor) -> tuple[Indices, str] | None:
    """The row of ``leaf`` that each row of ``view`` lies in, and which part of it; None if not so.

    ``leaf`` is contiguous. Rows of the view that are parts of one row count as one row.
    """
    size = leaf[:1].numel()
    if not size or not len(view):
        return None
    extent = sum(
        (length - 1) * step for length, step in zip(view.shape[1:], view.stride()[1:], strict=True)
    )
    begin = int(view.storage_offset()) - int(leaf.storage_offset())
    places = [divmod(begin + row * view.stride(0), size) for row in range(len(view))]
    inside = all(0 <= row < len(leaf) and start + extent < size for row, start in places)
    if not inside:
        return None
    starts = {start for _, start in places}
    rows = [row for row, _ in places]
    if len(starts) > 1:
        rows = list(dict.fromkeys(rows))
    whole = sum(view[:1].numel() for _ in starts) == size
    part = "" if whole else f"{min(starts)}+{extent}"
    return tuple(rows), part


def _found_in(leaf: Tensor, bits: float, rows: Tensor) -> RowsRead | None:
    """The rows as rows of this leaf of the batch, or as parts of them."""
    flat = rows.reshape(len(rows), -1)
    if not flat.shape[1] or not leaf[:1].numel():
        return None
    if rows.shape[1:] == leaf.shape[1:] and rows.dtype == leaf.dtype:
        candidates = equal_rows(leaf.reshape(len(leaf), -1), flat, bits, ways=0)
        if candidates is not None:
            return RowsRead(candidates)
    found = {}
    arrangements = list(_arrangements(leaf, flat))
    for part, batch, columns in arrangements:
        candidates = equal_rows(batch, columns, bits, len(arrangements))
        if candidates is not None:
            found[part] = candidates
    if FIRST in found and LAST in found and found[FIRST] != found[LAST]:
        return None  # two rows were joined to one
    if not found and flat.shape[1] == leaf[:1].numel():
        candidates = affine_rows(leaf.reshape(len(leaf), -1), flat, bits)
        found = {} if candidates is None else {"": candidates}
    if not found:
        return None
    parts = [part for part in found if part] if "" not in found else [""]
    return RowsRead(_each_once(_all_candidates(list(found.values())), flat), parts[0])


def _each_once(candidates: Candidates, flat: Tensor) -> Candidates:
    """Each example once, where every one stands in as many rows, and these differ.

    The call then holds several forms of each example, such as a prompt with either answer. Rows
    that are equal are the same example again.
    """
    often = Counter(candidates)
    times = {divmod(count, len(places)) for places, count in often.items()}
    if times == {(1, 0)} or len(times) > 1 or times.pop()[1]:
        return candidates
    if len(set(zip(candidates, bytes_of_rows(flat), strict=True))) < len(candidates):
        return candidates
    return tuple(places for places in often for _ in places)


def _all_candidates(found: Sequence[Candidates]) -> Candidates:
    """For each row, the positions that it has in any of these."""
    return tuple(
        tuple(sorted({place for places in of_row for place in places}))
        for of_row in zip(*found, strict=True)
    )


def _arrangements(leaf: Tensor, flat: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Matrices of what a row of the leaf may have become, and the columns that would hold it.

    The name is "" for whole rows.
    """
    batch, width = leaf.reshape(len(leaf), -1), flat.shape[1]
    size = batch.shape[1]
    if width == size:
        yield "", batch, flat
        dims = range(1, leaf.ndim)
        orders = list(permutations(dims))[1:] if 3 <= leaf.ndim <= 5 else []
        for number, order in enumerate(orders):
            yield f"order {number}", leaf.permute(0, *order).reshape(len(leaf), -1), flat
    elif width > size:
        yield FIRST, batch, flat[:, :size].contiguous()
        yield LAST, batch, flat[:, width - size :].contiguous()
    else:
        yield from ((name, block, flat) for name, block in _blocks(leaf, batch, width))


def _blocks(leaf: Tensor, batch: Tensor, width: int) -> Iterator[tuple[str, Tensor]]:
    """The parts of rows with ``width`` elements: of one dimension, or of the flattened row."""
    if batch.shape[1] - width < MOST_BLOCKS:
        for start in range(batch.shape[1] - width + 1):
            yield f"{start}+{width}", batch[:, start : start + width]
    for dim in range(2 if leaf.ndim > 2 else leaf.ndim, leaf.ndim):
        others = batch.shape[1] // max(1, leaf.shape[dim])
        length = width // others if others else 0
        if not others or width % others or not 0 < length < leaf.shape[dim]:
            continue
        for start in range(min(MOST_BLOCKS, leaf.shape[dim] - length + 1)):
            block = leaf.narrow(dim, start, length)
            yield f"{dim}: {start}+{length}", block.reshape(len(leaf), -1)
