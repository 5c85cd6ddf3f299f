"""Runs a command of this project on pretended GPUs, in a process of its own.

Its ranks are real processes. What is pretended is in ``pretended/dist-packages``. The folder has
this name because the ranks carry over the state of modules of a user, and not that of installed
packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRETENDED = Path(__file__).parent / "pretended" / "dist-packages"

LONGEST = 240.0
"""Seconds after which a rehearsal is taken to hang."""


@dataclass(frozen=True)
class Context:
    """One CUDA context that a process has made on a physical GPU.

    ``rank``: "-" for a process that is no rank. ``alive_before``: the contexts of other processes
    that were alive on the GPU then.
    """

    gpu: int
    process: int
    rank: str
    alive_before: int


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsed command did.

    ``contexts``: in the order in which they were made. ``log``: a line for everything that CUDA was
    asked, with the process and its rank: ``initialised``, ``context``, ``busy``, ``no_memory``.
    """

    returncode: int
    output: str
    contexts: tuple[Context, ...]
    log: tuple[str, ...]

    def most_contexts(self) -> dict[int, int]:
        """Physical GPU -> the largest number of contexts that were alive on it at one time."""
        most: dict[int, int] = {}
        for context in self.contexts:
            most[context.gpu] = max(most.get(context.gpu, 0), context.alive_before + 1)
        return most

    def initialised_by_no_rank(self) -> tuple[str, ...]:
        """The lines of the log in which a process that is no rank has initialised CUDA."""
        return tuple(line for line in self.log if "rank=- initialised" in line)


def rehearse(
    *arguments: str,
    gpus: int,
    exclusive: bool = False,
    contexts: int = 0,
    generator: bool = True,
    deferred: bool = False,
    lost: str | int | None = None,
    strict: bool = False,
    nvml: str = "answers",
    mig: bool = False,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = LONGEST,
) -> Rehearsed:
    """Run ``python -m`` with these arguments on a machine that seems to have ``gpus`` GPUs.

    ``exclusive``: their compute mode is EXCLUSIVE_PROCESS. ``contexts``: the memory of a GPU has
    room for so many CUDA contexts; 0 is any number. ``generator``: a GPU draws other random numbers
    than the CPU. ``deferred``: the result of a collective is there only after somebody has waited
    for it. ``lost``: a GPU that has died, or dies after a number of contexts ("1@2": GPU 1, after
    the second). ``strict``: tensors know their device, and mixing devices raises. ``nvml``:
    "answers", or its library is "missing", or it and the driver are a "mismatch". ``mig``: every
    GPU is divided into MIG devices. ``folder``: where the command runs, the root of the repository
    by default. ``environment``: more variables.
    Raises subprocess.TimeoutExpired after ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as own:
        switches = {
            "GPUS": str(gpus),
            "FOLDER": own,
            "EXCLUSIVE": str(int(exclusive)),
            "CONTEXTS": str(contexts),
            "GENERATOR": str(int(generator)),
            "DEFERRED": str(int(deferred)),
            "LOST": "" if lost is None else str(lost),
            "STRICT": str(int(strict)),
            "NVML": nvml,
            "MIG": str(int(mig)),
        }
        pretended = {f"PRETEND_{name}": value for name, value in switches.items()}
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=folder or ROOT,
            env=_environment() | pretended | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        log = Path(own) / "log"
        lines = tuple(log.read_text().splitlines()) if log.exists() else ()
    return Rehearsed(done.returncode, done.stdout, tuple(_contexts(lines)), lines)


def _environment() -> dict[str, str]:
    """The environment of this process, without GPUs and without what pytest put into it."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "COV_", "CUDA_", "NCCL_", "PRETEND_"))
    }
    return inherited | {"PYTHONPATH": os.pathsep.join([str(PRETENDED), str(ROOT)])}


def _contexts(lines: tuple[str, ...]) -> list[Context]:
    pattern = re.compile(r"(\d+) rank=(\S+) context gpu=(\d+) alive=(\d+)$")
    found = [match for line in lines if (match := pattern.match(line))]
    return [Context(int(m[3]), int(m[1]), m[2], int(m[4])) for m in found]
