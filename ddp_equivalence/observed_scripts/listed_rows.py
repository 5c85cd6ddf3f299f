"""Lists with one entry of tensors for each row, as collators of images with boxes make them.

Such a list looks like one of whole tensors, of which each has all rows, such as the crops that
some trainers make of a batch of images. It is told by the sizes along dim 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ddp_equivalence.case.batch_tree import children, leaves_of

Entry = Mapping[str, Any]
"""What a row has: its tensors and plain values, by the path inside the entry."""


def listed_rows(batch: Any) -> dict[str, list[Entry]]:
    """Path -> the entries of each list below the top whose entries are rows.

    A list is one if its entries are alike, and if something else in the batch has as many rows:
    another such list, or a tensor or a list of plain values. It is none if all tensors in it, and
    in the others of its length, are equally long along dim 0: then these are whole tensors, unless
    a tensor elsewhere has as many rows as the list has entries, and none is as long as they are.
    """
    lists = dict(_alike(batch, ""))
    lists.pop("", None)
    elsewhere = list(_sizes_elsewhere(batch, lists))
    found: dict[str, list[Entry]] = {}
    for count in {len(entries) for entries in lists.values()}:
        of_length = {path: one for path, one in lists.items() if len(one) == count}
        lengths = {
            leaf.shape[0] if leaf.ndim else None
            for entries in of_length.values()
            for entry in entries
            for leaf in entry.values()
            if isinstance(leaf, Tensor)
        }
        if len(lengths) == 1 and None not in lengths:
            are_rows = count in elsewhere and lengths.isdisjoint({count, *elsewhere})
        else:
            are_rows = count in elsewhere or len(of_length) > 1
        if are_rows:
            found |= of_length
    return found


def _alike(value: Any, path: str) -> Iterator[tuple[str, list[Entry]]]:
    """The outermost lists and tuples whose entries all have the same tensors."""
    if path and type(value) in (list, tuple) and value:
        entries = [dict(leaves_of(entry)) for entry in value]
        kinds = [
            {sub: (leaf.ndim, leaf.dtype) for sub, leaf in entry.items() if _is_tensor(leaf)}
            for entry in entries
        ]
        if kinds[0] and all(kind == kinds[0] for kind in kinds):
            yield path, list(entries)
            return
    for end, child in children(value) or ():
        yield from _alike(child, path + end)


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
    return type(value) in (list, tuple) and all(isinstance(one, str | int | float) for one in value)
