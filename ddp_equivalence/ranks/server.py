"""Starts the fork server, which imports torch once and from which all ranks are forked.

This module itself does not import torch.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from types import ModuleType
from typing import Any
from unittest.mock import patch

from ddp_equivalence.case.errors import BadCase

START_METHOD_VARIABLE = "DDP_EQUIVALENCE_START_METHOD"
"""The environment variable that chooses how ranks are started."""

START_METHODS = ("forkserver", "spawn")

PRELOAD = (
    "ddp_equivalence.ranks.server_cleanup",
    "ddp_equivalence.ranks.process",
    "ddp_equivalence.checking.check",
    "ddp_equivalence.measurement.preload",
)
"""The modules that the server imports, because importing them on every rank would take seconds.

Files with steps import ``check``, as a rule. The last module runs a check on ranks. They are given
by their names, since this package must not import them. multiprocessing ignores a name that does
not exist.
"""

COMPILE_THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"

FOLDER_VARIABLE = "DDP_EQUIVALENCE_SERVER_FOLDER"
"""The environment variable that tells the server in which folder its socket is."""

SOCKET_PATH_LIMIT = 100
"""How many bytes the path of a socket may have; Linux allows 107, macOS 103 (unix(7))."""

SOCKET_NAME = "/pymp-12345678/listener-12345678"
"""What multiprocessing appends to the temporary folder: a folder of its own, and a socket in it."""


def start_method() -> str:
    """``forkserver``, or ``spawn`` if the user asks for it or the platform has no fork server.

    With ``spawn`` every rank imports torch itself. Raises BadCase for any other method.
    """
    wanted = os.environ.get(START_METHOD_VARIABLE) or START_METHODS[0]
    if wanted not in START_METHODS:
        right = "forkserver (torch is imported once) or spawn (every rank imports torch)"
        raise BadCase(START_METHOD_VARIABLE, wanted, right)
    return wanted if wanted in multiprocessing.get_all_start_methods() else "spawn"


def start_server() -> None:
    """Start the server unless it is running. Returns at once, while the server still imports.

    Raises OSError if the system cannot start another process.
    """
    tests = ["pytest"] if "pytest" in sys.modules else []  # files with steps import it, too
    forkserver.set_forkserver_preload([*tests, *PRELOAD])
    _use_own_folder()
    _use_short_folder()
    _mend_folder()
    # Ranks inherit the server's environment: one thread each, and no pool of compile threads.
    variables = {
        "OMP_NUM_THREADS": "1",
        COMPILE_THREADS_VARIABLE: os.environ.get(COMPILE_THREADS_VARIABLE, "1"),
        FOLDER_VARIABLE: util.get_temp_dir(),
        # It must not take a file of the working folder, such as random.py, for a module of Python.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (_only_here(), os.environ.get("PYTHONPATH")))),
    }
    with empty_main_module(), _environment(variables):
        forkserver.ensure_running()


def _only_here() -> str:
    """The working folder if this package is only found because it lies there; else ""."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return root if root == os.getcwd() else ""


def _use_own_folder() -> None:
    """In a child process: do not use the parent's temporary folder, which it inherits.

    The server deletes the folder when it ends.
    """
    global _folder_owner
    if _folder_owner != os.getpid():
        _folder_owner = os.getpid()
        if _is_fork or multiprocessing.parent_process() is not None:
            configuration: Any = getattr(multiprocessing.current_process(), "_config", {})
            configuration.pop("tempdir", None)  # private: a test fails if it changes


def _use_short_folder() -> None:
    """Use ``/tmp`` if the temporary folder's path is too long for a socket in it.

    Build systems set ``TMPDIR`` to such paths, and binding the socket would fail with "AF_UNIX path
    too long". Only the first call of ``get_temp_dir`` in a process chooses the folder, so a folder
    that multiprocessing has chosen before remains.
    """
    if len(os.fsencode(tempfile.gettempdir() + SOCKET_NAME)) > SOCKET_PATH_LIMIT:
        with patch.object(tempfile, "tempdir", "/tmp"), suppress(OSError):
            util.get_temp_dir()


def _mend_folder() -> None:
    """Make the folder of the socket again if it has gone, as where a program tidies up ``/tmp``.

    A server whose socket is lost cannot be asked for anything. It is ended, and with it its ranks.
    """
    server: Any = getattr(forkserver, "_forkserver", None)  # private: a test fails if it changes
    address, pid = (getattr(server, f"_forkserver_{name}", None) for name in ("address", "pid"))
    if pid is not None and address is not None and not os.path.exists(address):
        with suppress(OSError):
            os.close(server._forkserver_alive_fd)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None
    os.makedirs(util.get_temp_dir(), mode=0o700, exist_ok=True)


_folder_owner = 0
"""The id of the process that ``_use_own_folder`` was called in."""

_is_fork = False


def _forget_server() -> None:
    """In a fork of this process: forget the server, which lives and dies with the parent."""
    global _is_fork
    _is_fork = True
    server: Any = getattr(forkserver, "_forkserver", None)  # private: a test fails if it changes
    if server is None or getattr(server, "_forkserver_pid", None) is None:
        return
    with suppress(OSError):
        os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None


os.register_at_fork(after_in_child=_forget_server)


def release_server() -> None:
    """Close this process's copy of the pipe that keeps the fork server alive.

    The server lives as long as any process holds the pipe open, and it passes a copy to every
    child, so that the child could fork from it as well (Python 3.11). A child that kept the copy
    would keep the server alive after the judging process has gone.
    """
    server: Any = getattr(forkserver, "_forkserver", None)  # private: a test fails if it changes
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
        server._forkserver_alive_fd = None


def start_early() -> None:
    """Start the server before it is needed, so that the first ranks start sooner.

    Only the first call in a process does anything; later ranks start the server if it has ended. An
    error is ignored here. It occurs again, and is reported, when the first ranks start.
    """
    global _started_early_by
    if _started_early_by == os.getpid():
        return
    with suppress(OSError, BadCase):
        if start_method() == "forkserver":
            start_server()
            _started_early_by = os.getpid()


_started_early_by = 0
"""The id of the process in which ``start_early`` has started the server."""


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def empty_main_module() -> Iterator[None]:
    """Replace the caller's ``__main__`` by an empty module inside the block.

    multiprocessing would otherwise run the caller's script again in every child process, and the
    script may have no ``if __name__ == "__main__"``.
    """
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module
