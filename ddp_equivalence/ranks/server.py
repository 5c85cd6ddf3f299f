"""The server that ranks are forked from, with torch imported once. Imports no torch itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from types import ModuleType

PRELOAD = ("ddp_equivalence.ranks.last_will", "ddp_equivalence.ranks.preload")

FOLDER = "DDP_EQUIVALENCE_SERVER_FOLDER"
"""Tells the server the folder that holds its socket."""


def start_server() -> None:
    """Start the server if it does not run; returns at once, while it imports.

    Raises OSError if the system has no room for it.
    """
    forkserver.set_forkserver_preload(list(PRELOAD))
    # One thread a rank; the server hands its environment on.
    with own_main(), _environment({"OMP_NUM_THREADS": "1", FOLDER: util.get_temp_dir()}):
        forkserver.ensure_running()


def start_early() -> None:
    """Start the server before anybody needs it; the first ranks then wait less for it.

    Where that fails, they say why.
    """
    with suppress(OSError):
        start_server()


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Inside, these variables are set."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def own_main() -> Iterator[None]:
    """Inside, children do not run the caller's ``__main__`` again, which may have no guard."""
    outer = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = outer
