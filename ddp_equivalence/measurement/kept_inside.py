"""Keeps an edited step from doing anything outside its process: it may write no file, for example.

An edit may turn a harmless step into one that writes to a wrong file, so none of this is allowed.
What is written by code in C that tells Python nothing is not noticed, except by ``torch.save``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

FORBIDDEN = frozenset(
    {
        "ftplib.connect",
        "http.client.connect",
        "os.chmod",
        "os.chown",
        "os.exec",
        "os.kill",
        "os.killpg",
        "os.link",
        "os.mkdir",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.removexattr",
        "os.rmdir",
        "os.setxattr",
        "os.spawn",
        "os.symlink",
        "os.system",
        "os.truncate",
        "os.utime",
        "shutil.copyfile",
        "shutil.move",
        "shutil.rmtree",
        "smtplib.connect",
        "sqlite3.connect",
        "subprocess.Popen",
        "urllib.Request",
    }
)
"""Events of docs.python.org/3/library/audit_events.html that change something outside."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

SENDING = ("socket.connect", "socket.sendto", "socket.sendmsg")

LOOPBACK = ("127.0.0.1", "::1", "localhost")

OF_WORKERS = "pymp-"
"""The multiprocessing module begins the names of its temporary folders so. The workers of a
DataLoader have sockets there."""


class WouldActOutside(Exception):
    """The step would have changed something outside its process."""


@contextmanager
def kept_inside(other_threads: bool = True) -> Iterator[list[str]]:
    """Inside the block, whatever would act outside raises WouldActOutside.

    A module that is imported there for the first time is not written to __pycache__.

    Yields a list of what was prevented, since the user's own code may catch the exception.
    ``other_threads``: False lets threads that run already do what they like.
    """
    global _inside, _is_hooked
    if not _is_hooked:  # a hook cannot be removed again
        sys.addaudithook(_hook)
        _is_hooked = True
    tempfile.gettempdir()  # the first call in a process tries to write a file
    others = threading.enumerate() if not other_threads else []
    free = frozenset(one.ident for one in others) - {threading.get_ident()}
    _inside = _Inside(free)
    try:
        with (
            patch.object(torch._C, "PyTorchFileWriter", _noted_writer),
            patch.object(sys, "dont_write_bytecode", True),
        ):
            yield _inside.prevented
    finally:
        _inside = None


class _Inside:
    """``free_threads``: those that nothing is forbidden to. ``prevented``: what was tried."""

    def __init__(self, free_threads: frozenset[int | None]) -> None:
        self.free_threads = free_threads
        self.prevented: list[str] = []


_inside: _Inside | None = None
_is_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _inside is None or threading.get_ident() in _inside.free_threads:
        return
    if what := _acts_outside(event, arguments):
        _inside.prevented.append(what)
        raise WouldActOutside(what)


def _acts_outside(event: str, arguments: tuple[Any, ...]) -> str:
    """What would happen, in words; "" if it stays inside the process."""
    if event == "open":
        path, mode, flags = arguments
        writes = any(letter in "wax+" for letter in mode or "") or bool((flags or 0) & WRITING)
        is_file = not isinstance(path, int) and os.fsdecode(path) != os.devnull
        return f"open {os.fsdecode(path)!r} for writing" if writes and is_file else ""
    if event in SENDING:
        address = arguments[1]
        is_elsewhere = isinstance(address, tuple) and address[0] not in LOOPBACK
        return f"connect to {address}" if is_elsewhere else ""
    if event in ("os.kill", "os.killpg") and arguments[0] == os.getpid():
        return ""
    return event if event in FORBIDDEN and not _is_of_workers(arguments) else ""


def _is_of_workers(arguments: tuple[Any, ...]) -> bool:
    path = arguments[0] if arguments else None
    folder = os.path.join(tempfile.gettempdir(), OF_WORKERS)
    return isinstance(path, str) and path.startswith(folder)


_torch_writer: Any = torch._C.PyTorchFileWriter


def _noted_writer(file: object, *arguments: Any) -> Any:
    """Opens the file of a ``torch.save``, in C. Python is told, as if it opened the file itself."""
    if isinstance(file, str):
        sys.audit("open", file, "w", 0)
    return _torch_writer(file, *arguments)
