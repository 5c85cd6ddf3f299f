"""Starts the user's command, with the watch in all of its Python processes, and ends it again."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.observed_scripts.told import STARTED_BY, VARIABLE, Told
from ddp_equivalence.ranks.float32_precision import TF32_OVERRIDE

STARTUP = Path(__file__).parent / "startup"
PACKAGE = Path(__file__).parents[2]

OFFLINE = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "file:mlruns",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Loggers of experiments send nothing anywhere while a script is observed, whatever they are told
otherwise.
"""

FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "512"}
"""Torch keeps so many collectives of a process that is watched."""

start = subprocess.Popen
"""Starts a process. The tests of this package put something in its place."""

LAST_LINES = 12

LONGEST = 40
"""A temporary folder with a longer path leaves too little for the socket of a multiprocessing
manager: the path of a socket has at most 107 bytes on Linux, and 103 on macOS."""

SECONDS_TO_PRINT = 10.0
"""A launcher that sees one of its processes fail prints the error and ends within this time."""

OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException")
"""Errors of launchers, which say only that a rank has failed."""

TRACEBACK = "Traceback (most recent call last)"
RANK_PREFIX = re.compile(r"^\[(rank)?\d+\]:( |$)")


class Running:
    """The command while it runs. ``log``: the file with all that it prints.

    Its temporary files have a folder of their own: it is ended at some step, and cannot delete
    them itself.
    """

    def __init__(self, command: Sequence[str], told: Told, at: Path, log: Path) -> None:
        self.command, self.log = tuple(command), log
        self._settings = log.with_suffix(".told.json")
        told.write(self._settings)
        self._output = log.open("wb")
        self._temporary = tempfile.mkdtemp(prefix="obs", dir=short_folder())
        try:
            self._process = start(
                self.command,
                cwd=at,
                env={**_environment(told, self._settings), "TMPDIR": self._temporary},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # such as a word with a byte of 0
            shutil.rmtree(self._temporary, ignore_errors=True)
            why = getattr(error, "strerror", None) or str(error)
            right = f"a command that can be started; {why}: {self.command[0]}"
            raise BadCase("command", " ".join(self.command), right) from error
        finally:
            self._output.close()
        self.started = time.monotonic()

    @property
    def exit_code(self) -> int | None:
        """Of the command itself; None while it runs."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The error that ended the script, else the end of what it printed."""
        return last_words(self.log.read_text(errors="replace"))

    def last_words_at_its_end(self) -> str:
        """The same, once the command has ended; not later than in a few seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_PRINT)
        return self.last_words

    def end(self) -> None:
        """End the command and everything that it started."""
        processes = _told_by(self._settings)
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=5)
        if self._process.poll() is None:  # such as a program that clears its environment
            self._process.kill()
        self._process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)


def last_words(printed: str) -> str:
    """The last lines of the first traceback that is not the launcher's, else the last of all."""
    lines = [RANK_PREFIX.sub("", line).rstrip() for line in printed.splitlines()]
    begins = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    for begin, end in pairwise([*begins, len(lines)]):
        of_error = lines[begin:end]
        last = next(
            (
                number
                for number, line in enumerate(of_error[1:], start=1)
                if line and not line.startswith(" ")
            ),
            len(of_error) - 1,
        )
        if not any(name in of_error[last] for name in OF_LAUNCHERS):
            return "\n".join(of_error[max(0, last - LAST_LINES) : last + 1])
    return "\n".join(lines[-LAST_LINES:])


def _told_by(settings: Path) -> list[psutil.Process]:
    """The processes with these settings in their environment: launchers start new sessions, and
    their children may outlive them.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE) == str(settings):
                found.append(process)
        except psutil.Error:
            continue
    return found


def short_folder() -> str | None:
    """Where temporary files go; None for the usual place, if paths of sockets are short there."""
    is_long = len(os.fsencode(tempfile.gettempdir())) > LONGEST
    return "/tmp" if is_long and os.access("/tmp", os.W_OK) else None


def _environment(told: Told, settings: Path) -> dict[str, str]:
    environment = dict(os.environ)
    if told.look_at is not None:
        environment = FLIGHT_RECORDER | environment
    paths = [str(STARTUP), environment.get("PYTHONPATH", ""), str(PACKAGE)]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment.setdefault("OMP_NUM_THREADS", "1")
    # With another batch size, cuDNN may choose an algorithm that rounds to TF32, or another one.
    environment.setdefault(TF32_OVERRIDE, "0")
    environment |= OFFLINE
    # python and torchrun are those of this environment, whether or not it has been activated.
    own = os.path.dirname(sys.executable)
    environment["PATH"] = os.pathsep.join((own, environment.get("PATH", os.defpath)))
    environment["PYTHONUNBUFFERED"] = "1"
    # What was compiled stays for the next start, as without this command.
    compiled = f"torchinductor_{getpass.getuser()}"
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), compiled))
    environment[VARIABLE] = str(settings)
    environment[STARTED_BY] = str(os.getpid())
    return environment
