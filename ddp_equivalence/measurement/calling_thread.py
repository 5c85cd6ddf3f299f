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


@contextmanager
def backward_on_calling_thread() -> Iterator[None]:
    """Inside the block, the backward passes that this thread calls run on it."""
    with torch.autograd.set_multithreading_enabled(False):
        yield
