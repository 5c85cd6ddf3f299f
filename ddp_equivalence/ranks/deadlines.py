"""Deadlines, the lock that lets one check run at a time, and the number of threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# A deadline that may be set while somebody already waits for it.


@dataclass
class Deadline:
    """``until``: the deadline by ``time.monotonic()``. ``within``: in words, for errors."""

    until: float
    within: str

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline so many seconds from now."""
        return cls(time.monotonic() + seconds, f"within the {seconds:.3g} s of the deadline")

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.until - time.monotonic()


# Lets only one thread of this process check at a time; the others wait.
#
# A check changes state of the whole process while it runs: random generators, torch's number of
# threads, ``__main__`` while ranks start. Two at once would also share the cores.


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait for the checks of other threads. A block inside a block of the same thread may run."""
    with _lock:
        yield


def _new_lock() -> None:
    """A fork has only one thread, so nobody would ever release a lock of another one."""
    global _lock
    _lock = threading.RLock()


_lock = threading.RLock()
os.register_at_fork(after_in_child=_new_lock)


# Limits the number of threads that torch uses in the judging process.

LARGE_MODEL = 2_000_000
"""For a model with at least this many parameters several threads save more time than they cost."""


_forked: list[bool] = []
os.register_at_fork(after_in_child=lambda: _forked.append(True))


def use_one_thread_in_a_fork() -> None:
    """Let torch compute with one thread, if this process was forked from another Python process.

    Torch's other threads do not exist in a fork, which would wait for them for ever. Torch does the
    same in the workers of a DataLoader.
    """
    if _forked and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


@contextmanager
def threads_beside(ranks: int) -> Iterator[None]:
    """Leave one core to each of the ranks that work at the same time.

    More threads than cores slow all of them down, by up to a factor of 4.
    """
    with _threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - ranks))):
        yield


@contextmanager
def threads_for(parameters: int) -> Iterator[None]:
    """Use a single thread for a model with few parameters.

    More threads would only wait for each other, or take a core from the ranks.
    """
    with _threads(1 if parameters < LARGE_MODEL else torch.get_num_threads()):
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
