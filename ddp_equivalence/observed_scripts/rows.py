"""The rows of a batch: what a script's loader yields, or what its model is called with.

A batch is taken apart into its tensors, and into lists with one entry for each row. The rows of
several ranks are joined into one batch, and put into the containers that the script itself made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.case.batch_tree import leaves_of, map_leaves
from ddp_equivalence.observed_scripts.listed_rows import TOP, Entry, listed_rows
from ddp_equivalence.observed_scripts.padding import padding_of

PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Rows:
    """``tensors``: by the path of the leaf. ``lists``: lists without tensors that have one entry
    for each row, by path. ``entries``: lists with tensors in the entry of each row, by path.
    ``count``: the number of rows along dim 0; 0 where nothing has rows. ``time_first``: the paths
    of the tensors whose rows are in dim 1 of the batch, see ``with_rows_first``.
    """

    tensors: Mapping[str, Tensor]
    lists: Mapping[str, list[Any]] = field(default_factory=dict)
    count: int = 0
    entries: Mapping[str, list[Entry]] = field(default_factory=dict)
    time_first: frozenset[str] = frozenset()

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
        """The same with every tensor changed."""
        return replace(
            self,
            tensors={path: change(tensor) for path, tensor in self.tensors.items()},
            entries={
                path: [
                    {
                        end: change(leaf) if isinstance(leaf, Tensor) else leaf
                        for end, leaf in entry.items()
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
    what the batch itself is padded with. A leaf with the rows end to end, and their lengths beside
    it, is taken apart by them. Raises ValueError where it is not known what one process
    would have: where the parts hold other lists of rows, or other tensors that have no rows.
    """
    first = parts[0][0]
    for rows, _ in parts:
        if rows.entries.keys() != first.entries.keys():
            raise ValueError(f"ranks have lists of rows at other places: {_places(rows, first)}")
        if rows.time_first != first.time_first:
            raise ValueError("ranks have their rows in other dimensions")
    tensors = {}
    for path in first.tensors:
        if not all(path in rows.tensors for rows, _ in parts):
            continue
        if all(rows.has_rows(path) for rows, _ in parts):
            taken = [_taken(rows.tensors[path], which) for rows, which in parts]
            tensors[path] = torch.cat(_padded_alike(taken, path, [rows for rows, _ in parts]))
        elif (ends := _taken_apart(path, parts)) is not None:
            tensors[path] = ends
        else:
            whole = first.tensors[path]
            if whole.ndim and not all(_equal(rows.tensors[path], whole) for rows, _ in parts):
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
    return Rows(tensors, lists, sum(counts), entries, first.time_first)


def _taken(tensor: Tensor, which: Sequence[int] | None) -> Tensor:
    return tensor if which is None else tensor[torch.as_tensor(list(which), dtype=torch.long)]


def _entries(entries: list[Any], which: Sequence[int] | None) -> list[Any]:
    return entries if which is None else [entries[place] for place in which if place < len(entries)]


def _taken_apart(path: str, parts: Sequence[Part]) -> Tensor | None:
    """A leaf of whole numbers in which the rows lie end to end: where the batch has numbers, one
    for each row, whose sum is the length of the leaf. Targets of a CTC loss lie like this. None if
    no such numbers are in all parts. Raises ValueError if the leaf may hold the numbers of rows or
    of other entries, which are others in a joined batch.
    """
    distinct = {id(rows): rows for rows, _ in parts}
    for other in parts[0][0].tensors:
        if not all(_belong(path, other, rows) for rows in distinct.values()):
            continue
        if all(_may_be_numbers_of_entries(path, rows) for rows in distinct.values()):
            raise ValueError(f"{path} has no rows, and may hold the numbers of other entries")
        if len({rows.tensors[path].shape[1:] for rows in distinct.values()}) > 1:
            raise ValueError(f"{path} has no rows, and other sizes on other ranks")
        split = {
            key: rows.tensors[path].split(rows.tensors[other].tolist())
            for key, rows in distinct.items()
        }
        return torch.cat(
            [
                split[id(rows)][row]
                for rows, which in parts
                for row in (range(rows.count) if which is None else which)
            ]
        )
    return None


def _belong(path: str, lengths: str, rows: Rows) -> bool:
    """True if these numbers say how much of the leaf belongs to each row."""
    if lengths not in rows.tensors or not rows.has_rows(lengths):
        return False
    leaf, numbers = rows.tensors[path], rows.tensors[lengths]
    are_whole = all(one.dtype in (torch.int32, torch.int64) for one in (leaf, numbers))
    if not are_whole or leaf.ndim == 0 or numbers.ndim != 1 or bool((numbers < 0).any()):
        return False
    return int(numbers.sum()) == len(leaf)


def _may_be_numbers_of_entries(path: str, rows: Rows) -> bool:
    """True if the largest number is that of the last row, or of the last entry of another leaf."""
    leaf = rows.tensors[path]
    others = {len(one) for name, one in rows.tensors.items() if name != path and one.ndim}
    return leaf.numel() > 0 and int(leaf.max()) + 1 in {rows.count, *others}


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
            taken = rows.tensors[path].to(leaf.device)
            return taken.transpose(0, 1).contiguous() if path in rows.time_first else taken
        if path in rows.lists and _is_list(leaf, own.count):
            return type(leaf)(rows.lists[path])
        return leaf

    return map_leaves(visit, native, is_leaf)


def _places(one: Rows, other: Rows) -> str:
    return ", ".join(sorted(one.entries.keys() ^ other.entries.keys()))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


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
