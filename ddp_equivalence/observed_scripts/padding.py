"""What the rows of a batch are padded with, where ranks have padded theirs to other lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out, by which most collators pad labels."""


@dataclass(frozen=True)
class Padding:
    """``is_seen``: a batch shows this value. Otherwise it is a guess."""

    value: float
    is_seen: bool


def padding_of(path: str, parts: Sequence[Mapping[str, Tensor]]) -> Padding:
    """What a leaf is padded with. ``parts``: the tensors of each batch, by their paths.

    It is the value that the leaf has where a mask of its shape marks padding; else the label that
    torch ignores, if it has such labels; else what several rows have twice at their end, or else at
    their beginning. Without all that it is a guess: -100 for labels, and 0.
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
    for places in ((-1, -2), (0, 1)):
        value = _value_at(tensors, places)
        if value is not None:
            return Padding(value, is_seen=True)
    return Padding(IGNORED_LABEL if "label" in path or "target" in path else 0, is_seen=False)


def _mark_of_padding(masks: Sequence[Tensor]) -> int:
    """What a mask has where rows are padded: 0, or True in one that begins with False everywhere,
    as a key_padding_mask does.
    """
    begins = [mask.reshape(len(mask), -1)[:, 0] for mask in masks if mask.numel()]
    are_bool = all(mask.dtype is torch.bool for mask in masks)
    return int(are_bool and bool(begins) and not any(bool(one.any()) for one in begins))


def _value_at(tensors: Iterable[Tensor], places: tuple[int, int]) -> float | None:
    """The value that half of the rows, and at least two of them, have at both places."""
    rows = [row for tensor in tensors if tensor.ndim > 1 and tensor.shape[1] > 2 for row in tensor]
    found: Counter[float] = Counter()
    for row in rows:
        both = row[list(places)].reshape(-1)
        if both.numel() and bool((both == both[0]).all()):
            found[float(both[0]) if row.is_floating_point() else int(both[0])] += 1
    value, count = found.most_common(1)[0] if found else (0, 0)
    return value if count >= 2 and 2 * count >= len(rows) else None
