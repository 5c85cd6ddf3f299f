"""Nudges move values by one eps, up or down at random, as other rounding could have moved them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

PLACES = 10_000
"""The distance between the random seeds of one nudge and those of the next."""

MOST_REMEMBERED = 4096
"""Factors are kept for the next check if they are for at most this many values."""


def nudge_each(tensors: Iterable[Tensor], number: int) -> None:
    """Move every value by one eps, up or down, as other rounding could have moved it.

    Whole numbers stay as they are: they may be labels or flags, and are rarely rounded.
    """
    with torch.no_grad():
        for place, tensor in enumerate(tensors, start=(number - 1) * PLACES):
            if tensor.is_floating_point() and tensor.layout is torch.strided:
                factors = _factors(place, tensor.numel(), tensor.dtype).view(tensor.shape)
                nudged = tensor * factors.to(tensor.device)
                tensor.copy_(torch.where(tensor == tensor.round(), tensor, nudged))


def _factors(place: int, count: int, dtype: torch.dtype) -> Tensor:
    """1 + eps or 1 - eps at random, for each of ``count`` values."""
    return (_small_factors if count <= MOST_REMEMBERED else _random_factors)(place, count, dtype)


def _random_factors(place: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(place)
    signs = torch.randint(2, (count,), generator=generator, dtype=torch.int8).to(dtype)
    return signs.mul_(2).sub_(1).mul_(torch.finfo(dtype).eps).add_(1)


_small_factors = lru_cache(maxsize=64)(_random_factors)
