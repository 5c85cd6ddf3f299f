"""Recognises the examples of the big batch in the tensors that a model is called with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.case import batch_tree
from ddp_equivalence.case.batch import BatchDims, dim_of, entries_by_example
from ddp_equivalence.measurement.calls import NotPlain, leaves_of_arguments, plain
from ddp_equivalence.measurement.observation import Indices, RowsRead

# A tensor that shares its memory with the tensors that the rank was given has rows that are known
# without doubt. Other tensors are recognised by their values: as rows of the batch, in another
# shape, order of dimensions or dtype, in part, or after an affine change.

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
        self, batch: object, given: Sequence[tuple[object, Indices]] = (), dims: BatchDims = None
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
    for leaf in leaves_of_arguments(arguments):
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


# Finds which rows of one matrix are the rows of another, exactly or after an affine change.
#
# A row is matched only by evidence: every row must fit, and all positions that it fits are
# returned.

Candidates = tuple[Indices, ...]
"""For every row, all positions in the big batch that it may come from."""

ROUNDING = 64.0
"""Values are equal after an affine change if they differ by at most this many eps."""

MOST_PAIRED = 64
"""An affine change of each feature is looked for in batches of at most this many examples."""

FEATURES_TRIED = 8
"""Anchors are looked for in this many features, and then checked in all."""

BITS_OF_A_FRACTION = 24.0
"""The information in a number that is not whole. A whole number has that of its range."""

BITS_NEEDED = 20.0
"""Rows of other numbers fit by chance once in 2 to this power."""


def bits_of_a_value(values: Tensor) -> float:
    """The information in a value of this tensor."""
    if not values.numel():
        return 0.0
    if values.is_floating_point() and bool((values != values.round()).any()):
        return BITS_OF_A_FRACTION
    spread = float(values.max()) - float(values.min())
    return min(BITS_OF_A_FRACTION, math.log2(1 + spread))


def equal_rows(batch: Tensor, rows: Tensor, bits: float, ways: int) -> Candidates | None:
    """The positions whose row is equal, bit for bit, once it has the dtype of ``rows``.

    ``batch``: shape (examples, features); ``rows``: shape (rows, features). None unless every row
    has a position, and unless other numbers would hardly fit by chance. ``bits``: the information
    in a value of the batch. ``ways``: the number of ways in which rows are looked for; 0 if these
    are rows as the batch has them, which need little evidence.
    """
    by_row = rows.shape[1] * bits - math.log2(len(batch) * max(1, ways))
    if by_row * len(rows) < (BITS_NEEDED if ways else 0.0) or by_row <= 0:
        return None
    begin = batch[:, :FEATURES_TRIED].to(rows.dtype)
    first = rows[0, :FEATURES_TRIED]
    if not bool(((begin == first) | (begin != begin)).all(1).any()):
        return None
    batch = batch.to(rows.dtype)
    positions: dict[bytes, list[int]] = {}
    for index, row in enumerate(bytes_of_rows(batch)):
        positions.setdefault(row, []).append(index)
    alike = {row: tuple(places) for row, places in positions.items()}
    candidates = [alike.get(row) for row in bytes_of_rows(rows)]
    return _if_all(candidates)


def affine_rows(batch: Tensor, rows: Tensor, bits: float) -> Candidates | None:
    """The positions whose row x gives the row as a * x + b, with the same a and b for all rows.

    a and b are numbers, or have a value for each feature. None unless every row has a position, and
    unless a and b follow from the rows without doubt. ``bits``: as for ``equal_rows``.
    """
    if not rows.is_floating_point() or _is_even_grid(rows) or _is_even_grid(batch):
        return None
    eps = torch.finfo(rows.dtype).eps
    if batch.is_floating_point():
        eps = max(eps, torch.finfo(batch.dtype).eps)
    bits = min(bits, -math.log2(ROUNDING * eps))
    x, y = batch.double(), rows.double()
    if not bool(x.isfinite().all() & y.isfinite().all()):
        return None
    count, features = rows.shape
    chance = count * math.log2(len(batch)) + BITS_NEEDED
    found = None
    if bits * (count * features - 2) >= chance:
        found = _scaled_rows(x, y, eps)
    if found is None and len(x) <= MOST_PAIRED and bits * (count - 2) * features >= chance:
        found = _scaled_features(x, y, eps)
    return found


def _scaled_rows(x: Tensor, y: Tensor, eps: float) -> Candidates | None:
    """One a and one b for all rows and features: the shape of each row is then the same."""
    shape_of_x, shape_of_y = _shapes(x), _shapes(y)
    alike = shape_of_y @ shape_of_x.T
    best = alike.abs().argmax(1)
    chosen = x[best]
    centred = chosen - chosen.mean()
    square = float((centred * centred).sum())
    if not square:
        return None
    a = float((centred * y).sum()) / square
    b = float(y.mean()) - a * float(chosen.mean())
    return _fitting(x, y, torch.full_like(x[0], a), torch.full_like(x[0], b), eps)


def _scaled_features(x: Tensor, y: Tensor, eps: float) -> Candidates | None:
    """An a and a b for each feature. Two rows give them, if it is known where these come from.

    For each pair of positions (p, q) of these two rows, the third row would have to come from
    x_p + t (x_q - x_p), where t follows from the rows alone.
    """
    second = int((y - y[0]).abs().sum(1).argmax())
    third = int((y - y[0]).abs().minimum((y - y[second]).abs()).sum(1).argmax())
    steps = y[second] - y[0]
    tried = steps.abs().topk(min(FEATURES_TRIED, x.shape[1])).indices
    if not bool(steps[tried].abs().min() > 0):
        tried = tried[steps[tried].abs() > 0]
    if not len(tried):
        return None
    t = ((y[third] - y[0]) / steps)[tried]
    few = x[:, tried]
    scale = few.abs().max() * (1 + t.abs())
    found: dict[Candidates, None] = {}
    for first in range(len(x)):
        wanted = few[first] + t * (few - few[first])
        distance = (wanted[:, None] - few[None]).abs() - 8 * ROUNDING * eps * scale
        for other in torch.nonzero((distance <= 0).all(2).any(1)).flatten().tolist():
            candidates = _with_anchors(x, y, (0, second), (first, other), eps)
            if candidates is not None:
                found[candidates] = None
            if len(found) > 1:
                return None
    return next(iter(found), None)


def _with_anchors(
    x: Tensor, y: Tensor, rows: Indices, places: Indices, eps: float
) -> Candidates | None:
    """The candidates, if these two ``rows`` come from these two ``places``."""
    run, rise = x[places[1]] - x[places[0]], y[rows[1]] - y[rows[0]]
    varies = run != 0
    if not bool(varies.any()) or bool((rise[~varies] != 0).any()):
        return None
    # Where the two places are equal, they say nothing of the feature's factor.
    a = rise[varies] / run[varies]
    b = y[rows[0]][varies] - a * x[places[0]][varies]
    return _fitting(x[:, varies], y[:, varies], a, b, eps)


def _fitting(x: Tensor, y: Tensor, a: Tensor, b: Tensor, eps: float) -> Candidates | None:
    """For each row of ``y``, the positions p with a x_p + b = y up to rounding."""
    if not bool(a.any()):
        return None
    predicted = a * x + b
    scale = torch.maximum((a * x).abs().amax(0), torch.maximum(b.abs(), y.abs().amax(0)))
    allowed = ROUNDING * eps * scale
    few = predicted[:, :FEATURES_TRIED]
    candidates = []
    for row in y:
        near = (few - row[:FEATURES_TRIED]).abs() <= allowed[:FEATURES_TRIED]
        places = torch.nonzero(near.all(1)).flatten()
        places = places[((predicted[places] - row).abs() <= allowed).all(1)]
        if not len(places):
            return None
        candidates.append(tuple(places.tolist()))
    return tuple(candidates)


def _shapes(rows: Tensor) -> Tensor:
    """Each row less its mean, with norm 1; zeros for a constant row."""
    centred = rows - rows.mean(1, keepdim=True)
    norms = centred.norm(dim=1, keepdim=True)
    return centred / torch.where(norms == 0, 1.0, norms)


def _is_even_grid(rows: Tensor) -> bool:
    """True if the rows are evenly spaced: any other such grid is an affine change of them."""
    if len(rows) < 3:
        return False
    values = rows.double()
    bends = values[2:] - 2 * values[1:-1] + values[:-2]
    return bool(bends.abs().max() <= 1e-5 * values.abs().max())


def _if_all(candidates: Sequence[Indices | None]) -> Candidates | None:
    known = tuple(places for places in candidates if places)
    return known if len(known) == len(candidates) else None


def bytes_of_rows(rows: Tensor) -> list[bytes]:
    """The bytes of every row. ``rows``: shape (rows, features), on the CPU."""
    if not rows.shape[1]:
        return [b""] * len(rows)
    return [row.tobytes() for row in rows.contiguous().view(torch.uint8).numpy()]


# A hash of the rows of tensors that is the same in whatever order and in however many calls.

MIXING = np.uint64(0x9E3779B97F4A7C15)
"""An odd number whose bits are irregular: 2^64 divided by the golden ratio."""


class UnorderedRows:
    """Adds up hashes of rows, one sum for each place in the arguments and each shape of a row."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, tuple[int, ...], str], int] = {}

    def add(self, tensors: list[Tensor]) -> None:
        """Add the rows of all these tensors, the arguments of one call."""
        for place, tensor in enumerate(tensors):
            rows = tensor if tensor.ndim else tensor.reshape(1)
            key = place, tuple(rows.shape[1:]), str(rows.dtype)
            self._sums[key] = (self._sums.get(key, 0) + int(row_hashes(rows).sum())) % 2**64

    def __str__(self) -> str:
        return " ".join(f"{key}: {value}" for key, value in sorted(self._sums.items()))


def row_hashes(rows: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """A hash of every row, by multilinear hashing of its 8-byte words."""
    if not rows.numel():
        return np.ones(len(rows), dtype=np.uint64)
    flat = rows.detach().cpu().reshape(len(rows), -1).contiguous().view(torch.uint8).numpy()
    missing = -flat.shape[1] % 8
    words = np.pad(flat, ((0, 0), (0, missing))).view(np.uint64)
    factors = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * MIXING | np.uint64(1)
    with np.errstate(over="ignore"):
        hashes = (words * factors).sum(axis=1, dtype=np.uint64)
        hashes = (hashes ^ (hashes >> np.uint64(29))) * MIXING
        hashes ^= hashes >> np.uint64(32)
        mixed: np.ndarray[tuple[int], np.dtype[np.uint64]] = hashes * MIXING
    return mixed
