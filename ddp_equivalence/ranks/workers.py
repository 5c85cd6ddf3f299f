"""Lets a step start worker processes on its rank, as it could in a training script.

A rank is itself a child process that multiprocessing has started, so some of multiprocessing's
state differs from that of a script. This module makes it the same.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, process
from typing import Any

LOADER_TIMEOUT = 1.0
"""Seconds that a worker of a DataLoader gets to end after its iterator is freed.

Torch 2.13 gives it 5 s. If garbage collection frees the iterator, the queues that tell its workers
to end are closed first, and the iterator waits for that long before it terminates each of them.
"""

_server: Any = getattr(forkserver, "_forkserver", None)  # private: a test fails if it changes


def allow_workers() -> None:
    """Allow this rank to have children, and let a DataLoader's workers end soon.

    A rank is daemonic, so that it never keeps the judging process from ending. Only the judging
    process needs to know that. A rank that knew it could have no children.
    """
    _configuration()["daemon"] = False
    loader_settings = sys.modules.get("torch.utils.data._utils")
    if hasattr(loader_settings, "MP_STATUS_CHECK_INTERVAL"):  # private, as above
        loader_settings.MP_STATUS_CHECK_INTERVAL = LOADER_TIMEOUT  # type: ignore[union-attr]


@contextmanager
def children_allowed() -> Iterator[None]:
    """Let this process start ranks inside the block, even if it is a worker of a Pool.

    Python refuses a daemonic process children, because nobody would end them. Its fork server ends
    the ranks, however this process ends.
    """
    configuration = _configuration()
    daemonic = configuration.get("daemon")
    configuration["daemon"] = False
    try:
        yield
    finally:
        configuration["daemon"] = daemonic


def _configuration() -> dict[str, Any]:
    """Multiprocessing's configuration of this process."""
    current: Any = process.current_process()
    configuration: dict[str, Any] = current._config  # private, as above
    return configuration


def forget_start_method() -> None:
    """Let multiprocessing start children in its default way again.

    A rank's own start method is otherwise the default in it. After a step has chosen a method, or
    has just used the default one, the next step could not choose.
    """
    if multiprocessing.get_start_method(allow_none=True) is not None:
        multiprocessing.set_start_method(None, force=True)


def own_server() -> int | None:
    """The process id of the fork server that a step has made this rank start, or None."""
    pid: int | None = getattr(_server, "_forkserver_pid", None)
    return pid


def stop_own_server() -> None:
    """Stop this rank's own fork server, which would keep its environment variables for later work.

    It must have no children: they would keep it alive.
    """
    if own_server() is not None:
        with suppress(OSError):
            _server._stop()


def wait_for_ended() -> list[Any]:
    """Wait for children that have ended. Returns multiprocessing's processes that still run.

    Python itself does so each time that it starts another child, so such a child is not left
    behind.
    """
    getattr(subprocess, "_cleanup", lambda: None)()
    return list(multiprocessing.active_children())
