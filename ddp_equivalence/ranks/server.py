"""The server that ranks are forked from, with torch imported once. Imports no torch itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from types import ModuleType

PRELOAD = "ddp_equivalence.ranks.preload"


def start_server() -> None:
    """Start the server if it does not run; returns at once, while it imports.

    The earlier this is called, the less the first check waits for it.
    """
    forkserver.set_forkserver_preload([PRELOAD])
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # one a rank; the server hands its environment on
    try:
        with own_main():
            forkserver.ensure_running()
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


@contextmanager
def own_main() -> Iterator[None]:
    """Inside, children do not run the caller's ``__main__`` again, which may have no guard."""
    outer = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = outer
