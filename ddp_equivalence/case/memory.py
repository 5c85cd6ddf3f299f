"""Gives freed memory back to the system, where a model is so large that others need it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

LARGE = 256 * 2**20
"""Bytes. Less than this is not worth the time to give back."""


@cache
def _trim() -> Any:
    """The function of glibc that returns free pages in the middle of the heap as well; None in
    other C libraries.
    """
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_memory(elements: int | None = None) -> None:
    """Return the free memory of this process to the system, and of torch's cache to the GPU.
    ``elements``: only if so many, of which each has 4 bytes, are worth it.
    """
    if elements is not None and 4 * elements < LARGE:
        return
    trim = _trim()
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
