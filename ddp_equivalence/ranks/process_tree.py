"""The processes that a rank starts, and those that these start: allows, finds and kills them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Options of prctl(2), which psutil does not offer."""

GONE = (psutil.Error, OSError)
"""The errors that psutil raises for a process that has ended or belongs to another user."""


def die_with_parent() -> None:
    """Ask Linux to send this process SIGKILL when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Ask Linux to make this process the parent of every descendant whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """True if this process has any child, including one that has ended but was not waited for.

    Every rank asks this after every case. The system call takes less than 1 us. psutil reads the
    state of all processes of the machine, which takes 600 us with 80 processes.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children(pid: int) -> dict[int, str]:
    """The child processes of a process: pid -> command line, "" if the child has ended."""
    return {child.pid: _command_line(child) for child in _below(pid, recursive=False)}


def process_name(pid: int) -> str:
    """The name that the process has given itself; "" if it has ended."""
    with suppress(*GONE):
        return str(psutil.Process(pid).name())
    return ""


def descendants(pid: int) -> list[psutil.Process]:
    """The children of a process, their children, and so on."""
    return _below(pid, recursive=True)


def with_variable(name: str, value: str) -> list[psutil.Process]:
    """The processes that were started with this variable in their environment."""
    processes = []
    # psutil 7.2 raises IndexError where /proc is empty.
    with suppress(*GONE, IndexError):
        for process in psutil.process_iter():
            with suppress(*GONE):
                if process.environ().get(name) == value:
                    processes.append(process)
    return processes


def left_in_group(leader: int) -> list[psutil.Process]:
    """The processes in the process group of a process that has ended.

    The result is empty if the process id of the leader belongs to a new process by now.
    """
    group = []
    for pid in psutil.pids():
        with suppress(*GONE):
            if os.getpgid(pid) == leader:
                group.append(psutil.Process(pid))
    new_leader = any(process.pid == leader and not _is_zombie(process) for process in group)
    return [] if new_leader else group


def is_stopped(pid: int) -> bool:
    """True if a signal such as SIGSTOP has stopped the process, which then cannot write a stack."""
    with suppress(*GONE):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each process that still exists.

    psutil compares start times, so it never kills a new process with the same pid.
    """
    for process in processes:
        with suppress(*GONE):
            process.kill()


def _below(pid: int, recursive: bool) -> list[psutil.Process]:
    processes: list[psutil.Process] = []
    with suppress(*GONE):
        processes = psutil.Process(pid).children(recursive=recursive)
    return processes


def _is_zombie(process: psutil.Process) -> bool:
    with suppress(*GONE):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def _command_line(process: psutil.Process) -> str:
    with suppress(*GONE):
        return " ".join(process.cmdline())
    return ""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


# Lets a step start worker processes on its rank, as it could in a training script.
#
# A rank is itself a child process that multiprocessing has started, so some of multiprocessing's
# state differs from that of a script. This makes it the same.

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
    this: Any = multiprocessing.current_process()
    configuration: dict[str, Any] = this._config  # private, as above
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
