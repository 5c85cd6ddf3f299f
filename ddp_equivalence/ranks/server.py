"""How ranks are started: forked from a server that has imported torch once. Imports no torch."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from types import ModuleType
from typing import Any

from ddp_equivalence.case.errors import BadCase

METHOD = "DDP_EQUIVALENCE_START_METHOD"
"""The environment variable that chooses how ranks are started."""

METHODS = ("forkserver", "spawn")

PRELOAD = ("ddp_equivalence.ranks.server_cleanup", "ddp_equivalence.measurement.measure.preload")

COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"

FOLDER = "DDP_EQUIVALENCE_SERVER_FOLDER"
"""Tells the server the folder that holds its socket."""


def start_method() -> str:
    """``forkserver``, or ``spawn`` where that is asked for or the platform has nothing else: each
    rank then imports torch itself.

    Raises BadCase if the environment asks for another one.
    """
    wanted = os.environ.get(METHOD) or METHODS[0]
    if wanted not in METHODS:
        raise BadCase(METHOD, wanted, "forkserver (torch imported once) or spawn (by each rank)")
    return wanted if wanted in multiprocessing.get_all_start_methods() else "spawn"


def start_server() -> None:
    """Start the server if it does not run; returns at once, while it imports.

    Raises OSError if the system has no room for it.
    """
    forkserver.set_forkserver_preload(list(PRELOAD))
    # One thread a rank, and no pool of compilers for each; the server hands its environment on.
    more = {"OMP_NUM_THREADS": "1", COMPILERS: os.environ.get(COMPILERS, "1")}
    with own_main(), _environment(more | {FOLDER: util.get_temp_dir()}):
        forkserver.ensure_running()


def _forget_server() -> None:
    """In a fork of this process: the server is the parent's, which it serves until that ends."""
    server: Any = getattr(forkserver, "_forkserver", None)  # private: a test says if it goes
    if server is None or getattr(server, "_forkserver_pid", None) is None:
        return
    with suppress(OSError):
        os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None


os.register_at_fork(after_in_child=_forget_server)


def start_early() -> None:
    """Start the server before anybody needs it; the first ranks then wait less for it.

    Where that fails, they say why.
    """
    with suppress(OSError, BadCase):
        if start_method() == "forkserver":
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
