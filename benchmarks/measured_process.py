"""Run one world of a benchmark in processes of its own, and leave nothing of it behind.

A world runs in a new session and a temporary folder. However it ends, by Ctrl-C too, whatever the
session still holds is killed and the folder removed.
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
"""Seconds that helpers of a finished world (a fork server) get to see that it is gone."""


class WorldFailed(Exception):
    """A world that did not do its work; the message is the end of what it printed."""


@dataclass(frozen=True)
class Finished:
    """A world that did its work: when it was started and had ended, and what it wrote."""

    started: float
    ended: float
    result: dict[str, Any]


def run_world(
    files: Mapping[str, Path],
    arguments: Sequence[str],
    settings: Mapping[str, object],
    limit: float,
) -> Finished:
    """Run ``python ARGUMENTS`` in a new folder with copies of ``files``; it writes its result.

    ``files``: name in the folder -> where it is. ``settings``: what the world is told, as
    BENCHMARK_<NAME> in its environment; BENCHMARK_RESULT is where it writes its JSON.
    Raises WorldFailed if it fails, writes nothing, or takes longer than ``limit`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "world").mkdir()
        for called, file in files.items():
            shutil.copyfile(file, folder / "world" / called)
        result = folder / "result.json"
        environment = _environment(folder / "tmp")
        told = settings | {"RESULT": result}
        environment |= {f"BENCHMARK_{name}": str(value) for name, value in told.items()}
        with (folder / "output").open("w+b") as output:
            started = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder / "world",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            late = Timer(limit, process.kill)
            late.start()
            try:
                code = process.wait()
                ended = time.monotonic()
            finally:
                in_time = late.is_alive()
                late.cancel()
                process.kill()
                process.wait()
                _end_session(process.pid)
            if code != 0 or not result.exists():
                output.seek(0)
                printed = output.read().decode(errors="replace").strip()
                reason = f"exit code {code}" if in_time else f"took longer than {limit:g} s"
                raise WorldFailed(f"{printed[-3000:]}\n{reason}")
        return Finished(started, ended, json.loads(result.read_text()))


def _environment(temporary: Path) -> dict[str, str]:
    """The same for every world: this checkout, its own temporary folder, no other plugins."""
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    own = {
        "PYTHONPATH": path,
        "TMPDIR": str(temporary),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        # A host name that resolves elsewhere would hang gloo.
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return os.environ | own


def _end_session(leader: int) -> None:
    """Wait for what the session still holds, then kill it."""
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
    """The processes of a session, but for those that are dead and not yet buried (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text()
        except OSError:
            continue  # it has just ended
        # state, parent, group, session; the name before them may hold anything
        state, _, _, session = status.rpartition(")")[2].split()[:4]
        if int(session) == leader and state not in "ZX":
            found.append(int(entry.name))
    return found


def end_with_sigterm() -> None:
    """Clean up on SIGTERM and SIGHUP as on Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def whole_number(least: int) -> Any:
    """An argparse type: a whole number that is at least this."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {least}")
        return int(text)

    return read


def machine() -> str:
    """One line on what the figures were taken on."""
    # Without importing torch: this process stays small beside what it measures.
    from importlib.metadata import version

    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"{time.strftime('%Y-%m-%d')}, {cores} CPU cores, load {load:.1f} at the start, "
        f"Python {python}, torch {version('torch')}, pytest {version('pytest')}"
    )
