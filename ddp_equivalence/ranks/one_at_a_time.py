"""Lets only one thread of this process check at a time; the others wait.

A check changes state of the whole process while it runs: random generators, torch's number of
threads, ``__main__`` while ranks start. Two at once would also share the cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
