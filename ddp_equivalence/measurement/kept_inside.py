"""Keeps an edited step from doing anything outside its process: it may write no file, for example.

An edit may turn a harmless step into one that writes to a wrong file, so none of this is allowed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FORBIDDEN = frozenset(
    {
        "ftplib.connect",
        "http.client.connect",
        "os.chmod",
        "os.chown",
        "os.exec",
        "os.link",
        "os.mkdir",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.spawn",
        "os.symlink",
        "os.system",
        "os.truncate",
        "shutil.copyfile",
        "shutil.move",
        "shutil.rmtree",
        "smtplib.connect",
        "socket.sendto",
        "sqlite3.connect",
        "subprocess.Popen",
        "urllib.Request",
    }
)
"""Events of docs.python.org/3/library/audit_events.html that change something outside."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class WouldActOutside(Exception):
    """The step would have changed something outside its process."""


@contextmanager
def kept_inside() -> Iterator[list[str]]:
    """Inside the block, whatever would act outside raises WouldActOutside.

    Yields a list of what was prevented, since the user's own code may catch the exception.
    """
    global _prevented, _is_hooked
    if not _is_hooked:  # a hook cannot be removed again
        sys.addaudithook(_hook)
        _is_hooked = True
    _prevented = []
    try:
        yield _prevented
    finally:
        _prevented = None


_prevented: list[str] | None = None
_is_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _prevented is None:
        return
    if what := _acts_outside(event, arguments):
        _prevented.append(what)
        raise WouldActOutside(what)


def _acts_outside(event: str, arguments: tuple[Any, ...]) -> str:
    """What would happen, in words; "" if it stays inside the process."""
    if event == "open":
        path, mode, flags = arguments
        writes = any(letter in "wax+" for letter in mode or "") or bool((flags or 0) & WRITING)
        is_file = not isinstance(path, int) and os.fsdecode(path) != os.devnull
        return f"open {os.fsdecode(path)!r} for writing" if writes and is_file else ""
    if event == "socket.connect":
        address = arguments[1]
        is_elsewhere = isinstance(address, tuple) and address[0] not in LOOPBACK
        return f"connect to {address}" if is_elsewhere else ""
    return event if event in FORBIDDEN else ""
