"""Runs the scripts of these tests in forks of one interpreter that has imported torch.

``observe`` starts an interpreter two or three times for a script, and each needs two seconds of
processor time to import torch and torch._dynamo. A fork of one that has imported them needs none.
It gets the same command, environment, folder and output, and the same watch begins in it. In the
place of torchrun, a fork forks the ranks. Tests whose subject is how a command is started start
real interpreters.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil

from ddp_equivalence.observed_scripts import launch
from ddp_equivalence.observed_scripts.queries import VARIABLE


@dataclass(frozen=True)
class Start:
    """What a fork is to run, and with what. ``ranks``: how many forks of the fork run it; None if
    it runs it itself.
    """

    command: Sequence[str]
    at: str
    environment: Mapping[str, str]
    output: str
    ranks: int | None = None


# --- in the interpreter that is forked


def serve(descriptor: int) -> None:
    """Fork for every ``Start`` that comes, and answer with the process id; for a process id, answer
    with its exit code, or None. Ends, with all forks, when the other side does. ``descriptor``: of
    this side of a pipe.
    """
    connection = Connection(descriptor)
    import torch._dynamo
    import torch.distributed
    import torch.optim  # noqa: F401

    forks: list[int] = []
    with suppress(EOFError):
        while True:
            asked = connection.recv()
            if isinstance(asked, Start):
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    _run(asked)
                forks.append(pid)
                connection.send(pid)
            else:
                ended, status = os.waitpid(asked, os.WNOHANG)
                connection.send(os.waitstatus_to_exitcode(status) if ended else None)
    for pid in forks:
        for one in processes_of(pid):
            one.kill()


def _run(start: Start) -> NoReturn:
    """Be the interpreter that was to be started."""
    os.setsid()
    os.chdir(start.at)
    for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, start.output, os.O_WRONLY)):
        file = os.open(path, mode | os.O_APPEND)
        os.dup2(file, number)
    os.dup2(1, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(start.environment)
    if start.ranks is not None:
        _be_a_rank_of(start.ranks)
    _, script, *words = start.command
    sys.argv, sys.orig_argv = [script, *words], list(start.command)
    paths = start.environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [os.path.dirname(os.path.abspath(script)), *paths, *sys.path]
    code = 0
    try:
        startup = runpy.run_path(str(launch.STARTUP / "sitecustomize.py"))
        if VARIABLE in os.environ:
            startup["_seed_numpy"]()  # torch and numpy are there: no import begins the watch
            startup["_begin"]()
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        util._exit_function()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
    """Stands in for ``subprocess.Popen`` where ``Running`` starts a command."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str], **more: Any):
        output = str(Path(more["stdout"].name))
        start = Start(tuple(command), str(cwd), dict(env), output, more.get("ranks"))
        self.pid: int = _asked(start)
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
        [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(launch.PACKAGE)},
        cwd=launch.PACKAGE,
        start_new_session=True,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        interpreter.wait()

    atexit.register(end)
    return ours


def _asked(question: Start | int) -> Any:
    connection = _interpreter()
    connection.send(question)
    return connection.recv()


TORCHRUN = re.compile(r"(\S*/)?torchrun|\S*python\S* -m torch.distributed.run")


def started(command: Sequence[str], **keywords: Any) -> Any:
    """A fork for a script that is started as ``python SCRIPT ...`` or by torchrun on one node; else
    a real process.
    """
    launcher = TORCHRUN.match(" ".join(command))
    if launcher is not None:
        words = list(command[len(launcher[0].split()) :])
        options = [words.pop(0) for _ in range(next(n for n, w in enumerate(words) if ".py" in w))]
        assert set(options[:-1]) <= {"--standalone", "--nproc-per-node"}, command
        script = (sys.executable, *words)
        return ForkedProcess(script, **keywords, ranks=int(options[-1]))
    if len(command) > 1 and command[0] == sys.executable and command[1].endswith(".py"):
        return ForkedProcess(command, **keywords)
    return subprocess.Popen(command, **keywords)
