"""Notices where a step shuffles: torch.randperm, random.shuffle and DistributedSampler."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from ddp_equivalence.ranks.torch_frames import counts_as_torch

OnShuffle = Callable[[FrameType, str, float | None], object]
"""Is told of a shuffle: the frame of the call, what shuffles, and the seed, if it was given one."""


def shuffle_handlers(on_shuffle: OnShuffle) -> dict[Any, Callable[[FrameType], object]]:
    """The functions that shuffle and are written in Python, and what to do at their calls."""

    def of_sampler(frame: FrameType) -> None:
        seed = frame.f_locals.get("seed")
        if frame.f_locals.get("shuffle"):
            number = float(seed) if isinstance(seed, int) else None
            on_shuffle(frame, DistributedSampler.__name__, number)

    return {
        random.Random.shuffle: lambda frame: on_shuffle(frame, "shuffle", None),
        DistributedSampler.__init__: of_sampler,
    }


@contextmanager
def randperm_recorded(on_shuffle: OnShuffle) -> Iterator[None]:
    """Inside the block, ``torch.randperm`` is noticed. It is not written in Python."""
    randperm = torch.randperm

    @counts_as_torch
    def recorded(*arguments: Any, **named: Any) -> Tensor:
        on_shuffle(sys._getframe(1), "randperm", None)
        return randperm(*arguments, **named)

    with patch.object(torch, "randperm", recorded):
        yield
