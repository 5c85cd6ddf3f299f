"""The rows of a batch: where they are in its tensors, and how batches are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.case.batch_tree import children, leaves_of, map_leaves

# What the rows of a batch are padded with, where ranks have padded theirs to other lengths.

IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out, by which most collators pad labels."""


UNORDERED = (torch.uint16, torch.uint32, torch.uint64)
"""Torch can neither flip nor compare tensors of these dtypes on the CPU."""


@dataclass(frozen=True)
class Padding:
    """``is_seen``: a batch shows this value. Otherwise it is a guess."""

    value: float
    is_seen: bool


def padding_of(path: str, parts: Sequence[Mapping[str, Tensor]]) -> Padding:
    """Find the value that pads a leaf. ``parts``: the tensors of each batch, by their paths.

    It is the value that the leaf has where a mask of its shape marks padding; else the label that
    torch ignores, if it has such labels; else a value with which the shorter rows of the batches
    end, or begin, and which stands nowhere else. Without all that it is a guess: -100 for labels,
    and 0.
    """
    tensors = [tensors[path] for tensors in parts]
    if "mask" in path:
        return Padding(_mark_of_padding(tensors), is_seen=True)
    seen: Counter[float] = Counter()
    for part in parts:
        for other, mask in part.items():
            if "mask" in other and mask.shape == part[path].shape:
                padding = _mark_of_padding([mask])
                seen.update(part[path][mask == padding].reshape(-1).tolist())
    if seen:
        return Padding(seen.most_common(1)[0][0], is_seen=True)
    if any(not one.is_floating_point() and bool((one == IGNORED_LABEL).any()) for one in tensors):
        return Padding(IGNORED_LABEL, is_seen=True)
    if any(one.is_complex() or one.dtype in UNORDERED for one in tensors):
        return Padding(0, is_seen=False)
    flat = [_with_lengths_last(one, tensors) for one in tensors]
    for sides in (flat, [one.flip(1) for one in flat]):
        value = _value_at_the_end(sides)
        if value is not None:
            return Padding(value, is_seen=True)
    return Padding(IGNORED_LABEL if "label" in path or "target" in path else 0, is_seen=False)


def _mark_of_padding(masks: Sequence[Tensor]) -> int:
    """The value of a mask where rows are padded: 0, or True in one that begins with False
    everywhere, as a key_padding_mask does.
    """
    begins = [mask.reshape(len(mask), -1)[:, 0] for mask in masks if mask.numel()]
    are_bool = all(mask.dtype is torch.bool for mask in masks)
    return int(are_bool and bool(begins) and not any(bool(one.any()) for one in begins))


def _with_lengths_last(tensor: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The tensor as ``[rows, length, the rest]``. The length: the first dim in which others differ,
    else dim 1.
    """
    dims = [
        dim
        for dim in range(1, tensor.ndim)
        if len({one.shape[dim] for one in tensors if one.ndim == tensor.ndim}) > 1
    ]
    moved = tensor.movedim(dims[0] if dims else 1, 1) if tensor.ndim > 1 else tensor[:, None]
    return moved.reshape(*moved.shape[:2], -1)


def _value_at_the_end(tensors: Sequence[Tensor]) -> float | None:
    """The value that fills the ends of shorter rows, and stands nowhere else. In each batch, some
    row must have none of it at its end, and in some batch another row must have it at least twice.
    """
    tensors = [one for one in tensors if one.numel()]
    values = {float(row) for one in tensors for row in one[:, -1].amin(-1).unique()}
    for value in sorted(values):
        runs = []
        for one in tensors:
            is_value = (one == value).all(-1)
            run = is_value.flip(1).long().cumprod(1).sum(1)
            if bool((is_value.sum(1) != run).any()) or int(run.min()) > 0:
                break
            runs.append(int(run.max()))
        else:
            if max(runs, default=0) > 1:
                return value if tensors[0].is_floating_point() else int(value)
    return None


# Lists with one entry of tensors for each row, as collators of images with boxes make them.
#
# Such a list looks like one of whole tensors, of which each has all rows, such as the crops that
# some trainers make of a batch of images. It is told by the sizes of the tensors.

Entry = Mapping[str, Any]
"""All that a row has: its tensors and plain values, by the path inside the entry."""

TOP = ("",)
"""The path of a batch."""

TOP_OF_CALL = ("", "[0]", "[1]")
"""The paths of (arguments, named arguments), which are no lists of rows."""


def listed_rows(batch: Any, top: Collection[str] = TOP) -> dict[str, list[Entry]]:
    """Path -> the entries of each list below the top whose entries are rows.

    A list is one if its entries are alike, if their sizes differ unless there is one only, and if
    something else in the batch has as many rows: a tensor, a list of plain values, or a list with
    other sizes. ``top``: the paths of what is no list of rows. Of the top itself, a list of dicts
    is one if their sizes differ.
    """
    lists = dict(_alike(batch, "", top))
    elsewhere = set(_sizes_elsewhere(batch, lists))
    found: dict[str, list[Entry]] = {}
    for count in {len(entries) for entries in lists.values()}:
        of_length = {path: one for path, one in lists.items() if len(one) == count}
        if _are_rows(count, list(of_length.values()), elsewhere) or "" in of_length:
            found |= of_length
    return found


def _are_rows(count: int, lists: Sequence[list[Entry]], elsewhere: Collection[int]) -> bool:
    shapes = [[_shapes(entry) for entry in entries] for entries in lists]
    lengths = {shape[0] if shape else None for of in shapes for one in of for shape in one}
    sizes_differ = any(one != of[0] for of in shapes for one in of)
    if len(lengths) == 1 and (None not in lengths):
        # They are as long along dim 0 as whole tensors are.
        beside = sizes_differ and count in elsewhere and lengths.isdisjoint({count, *elsewhere})
        have_dicts = len(lists) > 1 and any("" not in entries[0] for entries in lists)
        return beside or (have_dicts and lengths.isdisjoint(elsewhere))
    along_dim_0 = {tuple(one[0][:1] for one in of) for of in shapes}
    may_differ = sizes_differ or count == 1
    return may_differ and (count in elsewhere or len(along_dim_0) > 1)


def _shapes(entry: Entry) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in entry.values() if isinstance(leaf, Tensor)]


def _alike(value: Any, path: str, top: Collection[str]) -> Iterator[tuple[str, list[Entry]]]:
    """The outermost lists and tuples whose entries all have the same tensors."""
    is_list = type(value) in (list, tuple) and value
    if is_list and (path not in top or (top == TOP and _are_dicts_of_other_sizes(value))):
        entries = [dict(leaves_of(entry)) for entry in value]
        kinds = [
            {
                end: (leaf.ndim, leaf.dtype)
                for end, leaf in entry.items()
                if isinstance(leaf, Tensor)
            }
            for entry in entries
        ]
        if kinds[0] and all(kind == kinds[0] for kind in kinds):
            yield path, list(entries)
            return
    for end, child in children(value) or ():
        yield from _alike(child, path + end, top)


def _are_dicts_of_other_sizes(value: Sequence[Any]) -> bool:
    """True for a batch that its loader has not collated: a list of the rows themselves."""
    if not all(isinstance(one, Mapping) for one in value):
        return False
    shapes = [_shapes(dict(leaves_of(one))) for one in value]
    lengths = {shape[:1] for one in shapes for shape in one}
    return len(lengths) > 1


def _sizes_elsewhere(batch: Any, lists: Mapping[str, Any]) -> Iterator[int]:
    """The sizes along dim 0 of the tensors outside of these lists, and those of plain lists."""

    def stays_whole(path: str, value: Any) -> bool:
        return path in lists or (path != "" and _is_plain_list(value))

    for path, leaf in leaves_of(batch, stays_whole):
        if path in lists:
            continue
        if isinstance(leaf, Tensor) and leaf.ndim:
            yield leaf.shape[0]
        elif _is_plain_list(leaf):
            yield len(leaf)


def _is_plain_list(value: Any) -> bool:
    """A tuple of numbers is more likely a size, such as that of all images."""
    if type(value) not in (list, tuple):
        return False
    kinds = str if type(value) is tuple else str | int | float
    return all(isinstance(one, kinds) for one in value)


# The rows of a batch: what a script's loader yields, or what its model is called with.
#
# A batch is taken apart into its tensors, and into lists with one entry for each row. The rows of
# several ranks are joined into one batch, and put into the containers that the script itself
# made.

PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Rows:
    """``tensors``: by the path of the leaf. ``lists``: lists without tensors that have one entry
    for each row, by path. ``entries``: lists with tensors in the entry of each row, by path.
    ``count``: the number of rows along dim 0; 0 where nothing has rows.
    """

    tensors: Mapping[str, Tensor]
    lists: Mapping[str, list[Any]] = field(default_factory=dict)
    count: int = 0
    entries: Mapping[str, list[Entry]] = field(default_factory=dict)

    def has_rows(self, path: str) -> bool:
        """True if this tensor has one entry along dim 0 for each row."""
        tensor = self.tensors[path]
        return self.count > 0 and tensor.ndim > 0 and len(tensor) == self.count

    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its path in the batch, also those in the entries of lists."""
        yield from self.tensors.items()
        for path, entries in self.entries.items():
            for number, entry in enumerate(entries):
                for end, leaf in entry.items():
                    if isinstance(leaf, Tensor):
                        yield f"{path}[{number}]{end}", leaf

    def tensors_with_rows(self) -> Iterator[tuple[str, Tensor]]:
        """Those that have a row, or several."""
        for path, tensor in self.all_tensors():
            if path not in self.tensors or self.has_rows(path):
                yield path, tensor

    def changed(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """A copy with every tensor changed. Entries keep tensors and plain values alone."""
        return replace(
            self,
            tensors={path: change(tensor) for path, tensor in self.tensors.items()},
            entries={
                path: [
                    {
                        end: change(leaf) if isinstance(leaf, Tensor) else leaf
                        for end, leaf in entry.items()
                        if isinstance(leaf, Tensor) or type(leaf) in PLAIN
                    }
                    for entry in entries
                ]
                for path, entries in self.entries.items()
            },
        )


Part = tuple[Rows, Sequence[int] | None]
"""Rows of one rank, and which of them are taken; None for all."""


def rows_of(batch: Any, top: Collection[str] = TOP) -> Rows:
    """Take a batch apart. Its tensors are not copied. ``top``: as for ``listed_rows``."""
    entries = listed_rows(batch, top)
    sizes = Counter(
        len(tensor) for tensor in _tensors_beside(batch, entries).values() if tensor.ndim
    )
    sizes.update(len(one) for one in entries.values())
    count = sizes.most_common(1)[0][0] if sizes else 0
    entries = {path: one for path, one in entries.items() if len(one) == count}
    tensors = _tensors_beside(batch, entries)
    lists: dict[str, list[Any]] = {}
    for path, leaf in leaves_of(batch, lambda _, value: _is_list(value, count)):
        if _is_list(leaf, count):
            lists[path] = list(leaf)
    return Rows(tensors, lists, count, entries)


def _tensors_beside(batch: Any, entries: Mapping[str, Any]) -> dict[str, Tensor]:
    leaves = leaves_of(batch, lambda path, _: path in entries)
    return {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _is_list(value: Any, count: int) -> bool:
    return (
        type(value) in (list, tuple)
        and len(value) == count > 0
        and all(isinstance(one, PLAIN) for one in value)
    )


def joined(parts: Sequence[Part]) -> Rows:
    """The rows of all parts, one after the other.

    Where ranks have padded their rows to other lengths, the rows are padded to the longest, with
    what the batch itself is padded with. Raises ValueError where it is not known what one process
    would have: where the parts hold other lists of rows, or other tensors that have no rows.
    """
    first = parts[0][0]
    for rows, _ in parts:
        if rows.entries.keys() != first.entries.keys():
            raise ValueError(f"ranks have lists of rows at other places: {_places(rows, first)}")
    tensors = {}
    for path in first.tensors:
        if not all(path in rows.tensors for rows, _ in parts):
            continue
        if all(rows.has_rows(path) for rows, _ in parts):
            taken = [
                rows.tensors[path] if which is None else rows.tensors[path][list(which)]
                for rows, which in parts
            ]
            tensors[path] = torch.cat(_padded_alike(taken, path, [rows for rows, _ in parts]))
        else:
            whole = first.tensors[path]
            if whole.ndim and not all(torch.equal(rows.tensors[path], whole) for rows, _ in parts):
                raise ValueError(f"{path or 'the batch'} has no rows, and differs between ranks")
            tensors[path] = whole
    lists = {
        path: [
            entry for rows, which in parts for entry in _entries(rows.lists.get(path, []), which)
        ]
        for path in first.lists
    }
    entries = {
        path: [entry for rows, which in parts for entry in _entries(rows.entries[path], which)]
        for path in first.entries
    }
    counts = [rows.count if which is None else len(which) for rows, which in parts]
    return Rows(tensors, lists, sum(counts), entries)


def _entries(entries: list[Any], which: Sequence[int] | None) -> list[Any]:
    return entries if which is None else [entries[place] for place in which if place < len(entries)]


def _padded_alike(tensors: list[Tensor], path: str, parts: Sequence[Rows]) -> list[Tensor]:
    if len({tensor.shape[1:] for tensor in tensors}) <= 1:
        return tensors
    if len({tensor.ndim for tensor in tensors}) > 1:
        raise ValueError(f"the ranks have {path} with another number of dimensions")
    largest = [max(tensor.shape[dim] for tensor in tensors) for dim in range(1, tensors[0].ndim)]
    value = padding_of(path, [rows.tensors for rows in parts]).value
    padded = []
    for tensor in tensors:
        new = tensor.new_full((len(tensor), *largest), value)
        new[tuple(slice(0, size) for size in tensor.shape)] = tensor
        padded.append(new)
    return padded


def guessed_paddings(parts: Sequence[Rows]) -> list[str]:
    """The paths of the tensors whose rows ranks have padded to other lengths, without showing with
    what.
    """
    tensors = [rows.tensors for rows in parts]
    return [
        path
        for path in tensors[0]
        if all(path in rows.tensors and rows.has_rows(path) for rows in parts)
        and len({one[path].shape[1:] for one in tensors}) > 1
        and not padding_of(path, tensors).is_seen
    ]


def put_into(rows: Rows, native: Any, top: Collection[str] = TOP) -> Any:
    """The containers of ``native``, a batch that the script made, with these rows in them.

    Leaves that are no rows stay those of ``native``. Raises ValueError where it holds other lists
    of rows.
    """
    own = rows_of(native, top)
    if own.entries.keys() != rows.entries.keys():
        raise ValueError(f"one process has lists of rows at other places: {_places(own, rows)}")

    def is_leaf(path: str, value: Any) -> bool:
        return path in rows.entries or (_is_list(value, own.count) and path in rows.lists)

    def visit(path: str, leaf: Any) -> Any:
        if path in rows.entries:
            return type(leaf)(_like(leaf[0], entry) for entry in rows.entries[path])
        if isinstance(leaf, Tensor) and path in rows.tensors:
            return rows.tensors[path].to(leaf.device)
        if path in rows.lists and _is_list(leaf, own.count):
            return type(leaf)(rows.lists[path])
        return leaf

    return map_leaves(visit, native, is_leaf)


def _places(one: Rows, other: Rows) -> str:
    return ", ".join(sorted(one.entries.keys() ^ other.entries.keys()))


def _like(native: Any, entry: Entry) -> Any:
    """The entry of a row in the containers of another row's.

    Raises ValueError if it has other leaves.
    """
    lacking = {path for path, _ in leaves_of(native)} ^ entry.keys()
    if lacking:
        raise ValueError(f"the rows of a list have other parts: {', '.join(sorted(lacking))}")

    def visit(path: str, leaf: Any) -> Any:
        found = entry[path]
        same_device = isinstance(found, Tensor) and isinstance(leaf, Tensor)
        return found.to(leaf.device) if same_device else found

    return map_leaves(visit, native)
