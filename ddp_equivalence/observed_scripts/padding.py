"""What the rows of a batch are padded with, where ranks have padded theirs to other lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """What a leaf is padded with. ``parts``: the tensors of each batch, by their paths.

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
    """What a mask has where rows are padded: 0, or True in one that begins with False everywhere,
    as a key_padding_mask does.
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
