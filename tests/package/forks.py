"""Runs Python commands of these tests in forks of one interpreter that has imported torch.

A new interpreter needs two seconds of processor time to import torch and torch._dynamo. A fork of
one that has imported them needs none. It gets the same command, environment, folder and files. In
the place of torchrun, a fork forks the ranks. Tests whose subject is how a process is started, or
what it leaves behind, start real interpreters.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil

CHECKS = "ddp_equivalence.checking.check"
"""This imports almost all of the package, but not its plugin: pytest, which rewrites the asserts of
plugins, would warn that it was imported before.
"""

# --- in the interpreter that is forked


def serve(descriptor: int) -> None:
    """Fork for every set of arguments of ``_run`` that comes, and answer with the process id; for a
    process id, answer with its exit code, or None. Ends, with all forks, when the other side does.
    ``descriptor``: of this side of a pipe.
    """
    connection = Connection(descriptor)
    for module in ("torch._dynamo", "torch.distributed", "torch.optim", "pytest", CHECKS):
        importlib.import_module(module)
    forks: list[int] = []
    with suppress(EOFError):
        while True:
            asked = connection.recv()
            if isinstance(asked, dict):
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    _run(**asked)
                forks.append(pid)
                connection.send(pid)
            else:
                ended, status = os.waitpid(asked, os.WNOHANG)
                connection.send(os.waitstatus_to_exitcode(status) if ended else None)
    for pid in forks:
        for one in processes_of(pid):
            one.kill()


def _run(
    command: Sequence[str],
    at: str,
    environment: Mapping[str, str],
    files: Sequence[str],
    ranks: int | None,
) -> NoReturn:
    """Be the interpreter that was to be started. ``files``: its input, output and errors.
    ``ranks``: how many forks of this one are to run the command; None if this one is.
    """
    os.setsid()
    os.chdir(at)
    for number, (name, path) in enumerate(zip(("stdin", "stdout", "stderr"), files, strict=True)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY), number)
        stream = os.fdopen(number, "w" if number else "r", buffering=1, closefd=False)
        vars(sys).update({name: stream, f"__{name}__": stream})
    os.environ.clear()
    os.environ.update(environment)
    if ranks is not None:
        _be_a_rank_of(ranks)
    is_module = command[1] == "-m"
    name, *words = command[2 if is_module else 1 :]
    sys.argv, sys.orig_argv = [name, *words], list(command)
    paths = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [at if is_module else os.path.dirname(os.path.abspath(name)), *paths, *sys.path]
    code = 0
    try:
        _site_customized()
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        util._exit_function()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _site_customized() -> None:
    """Import what Python would have imported when it started. That of an observed script begins the
    watch once torch and numpy are imported, which they are.
    """
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        startup = importlib.import_module("sitecustomize")
        if "DDP_EQUIVALENCE_OBSERVE" in os.environ:
            startup._seed_numpy()
            startup._begin()


def _be_a_rank_of(world_size: int) -> None:
    """Fork the ranks as torchrun starts them, and wait for them; only a rank returns from here."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks: list[int] = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            values = (rank, rank, world_size, world_size)
            os.environ.update(zip(names, map(str, values), strict=True))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            return
        ranks.append(pid)
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:
            for rank in ranks:
                os.kill(rank, signal.SIGTERM)
            os._exit(1)
    os._exit(0)


def processes_of(leader: int) -> list[psutil.Process]:
    """All processes in the session that this process leads. Those that have ended are left out,
    though the first process of a container may never wait for them.
    """
    found = []
    for one in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(one.pid) == leader and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


# --- in the process of the tests


class ForkedProcess:
    """Stands in for ``subprocess.Popen``, with files for what the command reads and prints."""

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        stdout: Any,
        stdin: Any = subprocess.DEVNULL,
        stderr: Any = subprocess.STDOUT,
        ranks: int | None = None,
        **more: Any,
    ):
        read = os.devnull if stdin == subprocess.DEVNULL else stdin.name
        errors = stdout if stderr == subprocess.STDOUT else stderr
        self.pid: int = _asked(
            {
                "command": tuple(command),
                "at": str(cwd),
                "environment": dict(env),
                "files": (read, stdout.name, errors.name),
                "ranks": ranks,
            }
        )
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = _asked(self.pid)
            if self._code is not None:
                self.kill()  # what it has left behind
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or 60)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked script", timeout or 60)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        """End it with all that it has started; they have ended when this returns."""
        until = time.monotonic() + 60
        while (processes := processes_of(self.pid)) and time.monotonic() < until:
            for one in processes:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            time.sleep(0.005)


@cache
def _interpreter() -> Connection:
    """The connection to it. It ends with this process: the connection is closed then."""
    ours, theirs = multiprocessing.Pipe()
    interpreter = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd="/",
        start_new_session=True,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        interpreter.wait()

    atexit.register(end)
    return ours


def _asked(question: dict[str, Any] | int) -> Any:
    connection = _interpreter()
    connection.send(question)
    return connection.recv()


TORCHRUN = re.compile(r"(\S*/)?torchrun|\S*python\S* -m torch.distributed.run")


def started(command: Sequence[str], **keywords: Any) -> Any:
    """A fork for a script, a module (``python -m``) or torchrun on one node; else a process."""
    launcher = TORCHRUN.match(" ".join(command))
    if launcher is not None:
        words = list(command[len(launcher[0].split()) :])
        options = [words.pop(0) for _ in range(next(n for n, w in enumerate(words) if ".py" in w))]
        assert set(options[:-1]) <= {"--standalone", "--nproc-per-node"}, command
        script = (sys.executable, *words)
        return ForkedProcess(script, **keywords, ranks=int(options[-1]))
    if command[0] == sys.executable and command[1:] and command[1].endswith((".py", "-m")):
        return ForkedProcess(command, **keywords)
    return subprocess.Popen(command, **keywords)


def completed(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    input: str = "",
    ranks: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """As from ``subprocess.run``, but of a fork, which ends with all that it has started, or of as
    many forks as there are ranks.
    """
    with (
        tempfile.NamedTemporaryFile("w+") as stdin,
        tempfile.NamedTemporaryFile("r") as stdout,
        tempfile.NamedTemporaryFile("r") as stderr,
    ):
        stdin.write(input)
        stdin.flush()
        fork = ForkedProcess(command, cwd, env, stdout, stdin, stderr, ranks)
        try:
            code = fork.wait(timeout)
        finally:
            fork.kill()
        return subprocess.CompletedProcess(command, code, stdout.read(), stderr.read())


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    serve(int(sys.argv[1]))
