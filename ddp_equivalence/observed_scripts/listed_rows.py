"""Lists with one entry of tensors for each row, as collators of images with boxes make them.

Such a list looks like one of whole tensors, of which each has all rows, such as the crops that
some trainers make of a batch of images. It is told by the sizes of the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ddp_equivalence.case.batch_tree import children, leaves_of

Entry = Mapping[str, Any]
"""What a row has: its tensors and plain values, by the path inside the entry."""

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
        return beside or (_has_dicts(lists) and len(lists) > 1 and lengths.isdisjoint(elsewhere))
    along_dim_0 = {tuple(one[0][:1] for one in of) for of in shapes}
    may_differ = sizes_differ or count == 1
    return may_differ and (count in elsewhere or len(along_dim_0) > 1)


def _has_dicts(lists: Sequence[list[Entry]]) -> bool:
    return any("" not in entries[0] for entries in lists)


def _shapes(entry: Entry) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in entry.values() if isinstance(leaf, Tensor)]


def _alike(value: Any, path: str, top: Collection[str]) -> Iterator[tuple[str, list[Entry]]]:
    """The outermost lists and tuples whose entries all have the same tensors."""
    is_list = type(value) in (list, tuple) and value
    if is_list and (path not in top or (top == TOP and _are_dicts_of_other_sizes(value))):
        entries = [dict(leaves_of(entry)) for entry in value]
        kinds = [
            {end: (leaf.ndim, leaf.dtype) for end, leaf in entry.items() if _is_tensor(leaf)}
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


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


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
