"""How many threads torch takes beside ranks that work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LARGE = 2_000_000
"""Parameters from which on a model is worth several threads, though they have to be waited for."""


@contextmanager
def threads_beside(ranks: int) -> Iterator[None]:
    """Leave a core to each rank: more threads than cores make all of them slower, by up to 4."""
    with _threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - ranks))):
        yield


@contextmanager
def threads_for(parameters: int) -> Iterator[None]:
    """One for a small model: others only wait, or take a core from the ranks."""
    with _threads(1 if parameters < LARGE else torch.get_num_threads()):
        yield


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
