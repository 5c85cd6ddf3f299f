"""Starts the user's command, with the watch in all of its Python processes."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.observed_scripts.queries import STARTED_BY, VARIABLE, Instructions
from ddp_equivalence.ranks.messages import was_left_waiting
from ddp_equivalence.ranks.process_state import TF32_OVERRIDE
from ddp_equivalence.ranks.process_tree import kill, with_variable

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

LAUNCHERS_ERRORS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException")
"""Errors of launchers, which say only that a rank has failed."""

TRACEBACK = "Traceback (most recent call last)"
RANK_PREFIX = re.compile(r"^\[(rank)?\d+\]:( |$)")


class Running:
    """The command while it runs, in the user's folder or in a copy of it beside the log.
    ``log``: the file with all that it prints.

    Its temporary files have a folder of their own: it is ended at some step, and cannot delete
    them itself.
    """

    def __init__(self, command: Sequence[str], instructions: Instructions, log: Path) -> None:
        folder = at = Path(instructions.options.folder)
        if not instructions.options.in_place:
            at = log.parent / "working_folder"
            instructions = replace(instructions, working_folder=str(at))
            if not at.exists():
                copy_of_links(folder, at)
        self.command, self.log = with_own_scripts(command, folder), log
        self._settings = log.with_suffix(".instructions")
        instructions.write(self._settings)
        self._output = log.open("wb")
        self._temporary = tempfile.mkdtemp(prefix="obs", dir=short_folder())
        try:
            self._process = start(
                self.command,
                cwd=at,
                env={**_environment(instructions, self._settings), "TMPDIR": self._temporary},
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
        """``last_words``, once the command has ended; not later than in a few seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_PRINT)
        return self.last_words

    def end(self) -> None:
        """End the command and everything that it started: launchers start new sessions, and their
        children may outlive them.
        """
        processes = with_variable(VARIABLE, str(self._settings))
        kill(processes)
        psutil.wait_procs(processes, timeout=5)
        if self._process.poll() is None:  # such as a program that clears its environment
            self._process.kill()
        self._process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)


def last_words(printed: str) -> str:
    """The last lines of the first traceback that is neither the launcher's nor that of a rank which
    another one has left waiting; else of the first that is not the launcher's; else the last of
    all.
    """
    lines = [RANK_PREFIX.sub("", line).rstrip() for line in printed.splitlines()]
    begins = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    found: dict[bool, str] = {}
    for begin, end in pairwise([*begins, len(lines)]):
        rest = range(begin + 1, end)
        last = next((n for n in rest if lines[n] and not lines[n].startswith(" ")), end - 1)
        if not any(name in lines[last] for name in LAUNCHERS_ERRORS):
            waited = was_left_waiting(lines[last])
            found.setdefault(waited, "\n".join(lines[max(begin, last - LAST_LINES) : last + 1]))
    return found.get(False) or found.get(True) or "\n".join(lines[-LAST_LINES:])


def short_folder() -> str | None:
    """Where temporary files go; None for the usual place, if paths of sockets are short there."""
    is_long = len(os.fsencode(tempfile.gettempdir())) > LONGEST
    return "/tmp" if is_long and os.access("/tmp", os.W_OK) else None


def _environment(instructions: Instructions, settings: Path) -> dict[str, str]:
    environment = dict(os.environ)
    if instructions.look_at is not None:
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


# A copy of the user's folder for a script to run in: folders are made anew, files are links.
#
# What the script writes below its working folder, such as checkpoints, stays in the copy.

MOST_ENTRIES = 20_000
"""Folders below so many files are links themselves, and are written to if the script does that."""

LINKED = frozenset((".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".tox"))
"""Folders that are always links."""


def copy_of_links(folder: Path, to: Path) -> None:
    """Make the copy. ``to`` must not exist."""
    to.mkdir(parents=True)
    left = MOST_ENTRIES
    waiting = [(folder.resolve(), to)]
    while waiting:
        source, copy = waiting.pop(0)  # folders near the top are copied first
        try:
            entries = sorted(os.scandir(source), key=lambda entry: entry.name)
        except OSError:
            continue
        left -= len(entries)
        for entry in entries:
            at = copy / entry.name
            if Path(entry.path) in (to, *to.parents):
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and entry.name not in LINKED and left > 0:
                at.mkdir()
                waiting.append((Path(entry.path), at))
            else:
                at.symlink_to(os.path.realpath(entry.path))


def with_own_scripts(command: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The command with the paths of Python files made absolute.

    They then run under their own names, and find the modules beside them.
    """
    return tuple(
        str((folder / word).resolve())
        if word.endswith(".py") and not os.path.isabs(word) and (folder / word).is_file()
        else word
        for word in command
    )


# The user's command, changed so that it trains in one process.

PROCESS_COUNT_OPTIONS = (
    "nproc-per-node",
    "nproc_per_node",
    "num_processes",
    "num-processes",
    "nprocs",
)
"""Options that say how many processes a launcher starts."""

OPTIONS = (
    *PROCESS_COUNT_OPTIONS,
    *("devices", "trainer.devices", "num_devices", "num-devices", "nproc"),
    *("world-size", "world_size", "num-gpus", "num_gpus", "gpus", "ngpus"),
    *("n-gpus", "n_gpus", "gpu_num", "gpus-per-node", "gpus_per_node"),
)
"""Options of launchers and scripts that may say how many processes train."""

OF_OPTION = re.compile(rf"^-{{0,2}}({'|'.join(map(re.escape, OPTIONS))})(=(?P<value>.*))?$")

RIGHT = (
    "one that trains in one process, given with --one-process: no number of processes was "
    "found in this one"
)


def in_one_process(command: Sequence[str], world_size: int) -> tuple[str, ...]:
    """Replace every number of processes in the command by 1.

    Raises BadCase if there is none, and the command is not known to count devices itself.
    """
    words, found = list(command), False
    for place, _, value in _counts_in(command):
        if value in (str(world_size), "gpu", "auto", "cpu"):
            words[place], found = f"{words[place].removesuffix(value)}1", True
    names = [os.path.basename(word) for word in words]
    if not found and "launch" in names and any("accelerate" in name for name in names):
        place = names.index("launch") + 1
        words[place:place] = ["--num_processes", "1"]
        found = True
    if not found:
        raise BadCase("one_process", " ".join(command), RIGHT)
    return tuple(word for word in words if word not in ("--multi_gpu", "--multi-gpu"))


def processes_in(command: Sequence[str]) -> int | None:
    """The number of processes that a command names in an option; None if it names none."""
    known = (*PROCESS_COUNT_OPTIONS, "devices", "trainer.devices")
    values = (value for _, option, value in _counts_in(command) if option in known)
    return next((int(value) for value in values if value.isdecimal()), None)


def _counts_in(command: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """For each option that may say how many processes train: the place of the word that has its
    value, its name, and the value.
    """
    for place, word in enumerate(command):
        if match := OF_OPTION.match(word):
            if match["value"] is not None:
                yield place, match[1], match["value"]
            elif place + 1 < len(command):
                yield place + 1, match[1], command[place + 1]
