"""Run one program of a benchmark in a new process, and leave nothing of it behind.

A program runs in a new session and a temporary folder. However it ends, by Ctrl-C too, every
process that is left in the session is killed, and the folder is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
CHECKOUT = BENCHMARKS.parent

GRACE = 2.0
"""Seconds that helpers of a finished program, such as a fork server, get to end by themselves."""


class ProgramFailed(Exception):
    """A program did not do its work; the message is the end of its output."""


@dataclass(frozen=True)
class Finished:
    """When a program was started and when it had ended, and the result that it wrote."""

    started: float
    ended: float
    result: dict[str, Any]


def run_program(
    files: Mapping[str, Path],
    arguments: Sequence[str],
    settings: Mapping[str, object],
    limit: float,
) -> Finished:
    """Run ``python ARGUMENTS`` in a new folder that holds copies of ``files``.

    ``files``: the name in the folder -> the file to copy. ``settings``: the program reads them as
    BENCHMARK_<NAME> in its environment. It writes its result as JSON to BENCHMARK_RESULT. Raises
    ProgramFailed if it fails, writes nothing, or takes longer than ``limit`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "program").mkdir()
        for file_name, file in files.items():
            shutil.copyfile(file, folder / "program" / file_name)
        result = folder / "result.json"
        environment = _environment(folder / "tmp")
        variables = settings | {"RESULT": result}
        environment |= {f"BENCHMARK_{name}": str(value) for name, value in variables.items()}
        with (folder / "output").open("w+b") as output:
            started = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder / "program",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            timeout = Timer(limit, process.kill)
            timeout.start()
            try:
                code = process.wait()
                ended = time.monotonic()
            finally:
                in_time = timeout.is_alive()
                timeout.cancel()
                process.kill()
                process.wait()
                _end_session(process.pid)
            if code != 0 or not result.exists():
                output.seek(0)
                printed = output.read().decode(errors="replace").strip()
                reason = f"exit code {code}" if in_time else f"took longer than {limit:g} s"
                raise ProgramFailed(f"{printed[-3000:]}\n{reason}")
        return Finished(started, ended, json.loads(result.read_text()))


def _environment(temporary: Path) -> dict[str, str]:
    """The same for every program: this checkout, a temporary folder, no other plugins."""
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    variables = {
        "PYTHONPATH": path,
        "TMPDIR": str(temporary),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        # A host name that resolves elsewhere would hang gloo.
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return os.environ | variables


def _end_session(leader: int) -> None:
    """Wait for the processes that are left in the session, then kill them."""
    until = time.monotonic() + GRACE
    while left := _members(leader):
        if time.monotonic() > until:
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.01)


def _members(leader: int) -> list[int]:
    """The processes of a session without its zombies (Linux)."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text()
        except OSError:
            continue  # the process has just ended
        # The name may contain anything. After it come state, parent, group and session.
        state, _, _, session = status.rpartition(")")[2].split()[:4]
        if int(session) == leader and state not in "ZX":
            members.append(int(entry.name))
    return members


def end_with_sigterm() -> None:
    """Let SIGTERM and SIGHUP clean up as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def whole_number(least: int) -> Any:
    """An argparse type for whole numbers from ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {least}")
        return int(text)

    return read


def machine() -> str:
    """One line about the machine and the versions on which the figures were measured."""
    # Importing torch here would make this process large beside those that it measures.
    from importlib.metadata import version

    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"{time.strftime('%Y-%m-%d')}, {cores} CPU cores, load {load:.1f} at the start, "
        f"Python {python}, torch {version('torch')}, pytest {version('pytest')}"
    )
