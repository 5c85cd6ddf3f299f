"""Lets backward passes run on the thread that calls them, so that what watches it sees them.

On CUDA autograd runs a backward pass on a thread of the device. A trace function, and the frames of
the line that called it, are not there: hooks, backward methods of the user's own, and the line of
every operation would be missing. On the CPU this is how backward passes run anyway.
Source: docs.pytorch.org, ``torch.autograd.grad_mode.set_multithreading_enabled``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_before: list[bool] = []
"""For each block that runs, whether autograd might use other threads before the first of them."""


@contextmanager
def backward_on_calling_thread() -> Iterator[None]:
    """Inside the block, the backward passes that this thread calls run on it.

    Blocks may end in another order than that in which they began: a log of operations begins before
    a step is observed, and ends before it. The setting comes back with the last one.
    """
    _before.append(_before[0] if _before else torch._C._is_multithreading_enabled())
    torch._C._set_multithreading_enabled(False)
    try:
        yield
    finally:
        before = _before.pop()
        if not _before:
            torch._C._set_multithreading_enabled(before)
