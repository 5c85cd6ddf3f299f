"""Processes that a rank has started, theirs too, and how to end them (through Linux's /proc)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_PROC = Path("/proc")


def die_with_parent() -> None:
    """SIGKILL for this process when its parent goes (Linux)."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """A descendant whose own parent ends becomes a child of this process: none gets away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """True if this process has any child, ended ones that nobody waited for too; takes 1 us."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children(pid: int) -> dict[int, str]:
    """The child processes of a process, with their command lines ("" once they have ended)."""
    return {child: _command(child) for child in _by_parent().get(pid, [])}


def descendants(pid: int) -> list[int]:
    """All processes below a process, the nearest first."""
    of_parent = _by_parent()
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = of_parent.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def with_variable(name: str, value: str) -> list[int]:
    """The processes that were started with this variable in their environment."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def is_stopped(pid: int) -> bool:
    """True if a signal has stopped it (SIGSTOP), so that it cannot even tell its stack."""
    return _state_and_parent(pid)[0] in ("T", "t")


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each that is still there."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            found.setdefault(_state_and_parent(int(entry.name))[1], []).append(int(entry.name))
    return found


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return "", 0
    # Both follow the command's name, which may hold anything but is in parentheses.
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def _command(pid: int) -> str:
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)
