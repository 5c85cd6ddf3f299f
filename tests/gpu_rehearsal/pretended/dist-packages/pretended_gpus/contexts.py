"""CUDA contexts: a file for each process on each GPU, locked as long as the process lives.

As on a real GPU there may be too little memory for another context, the compute mode may allow only
one, and the GPU may be lost.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from pretended_gpus import settings

BUSY = "CUDA-capable device(s) is/are busy or unavailable"
NO_MEMORY = "out of memory"
FAILED = "unspecified launch failure"

ADVICE = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)

_held: dict[int, IO[str]] = {}
"""Physical GPU -> the locked file that is this process's context there."""


def cuda_error(what: str) -> Exception:
    """The exception that torch raises for an error of CUDA."""
    import torch

    return torch.AcceleratorError(f"CUDA error: {what}\n{ADVICE}")


def enter(gpu: int) -> None:
    """Make this process's context on a physical GPU, unless it has one."""
    if gpu in _held:
        return
    folder = settings.folder() / f"gpu{gpu}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make(gpu, folder)


def _make(gpu: int, folder: Path) -> None:
    alive = len(processes(gpu))
    if lost(gpu):
        raise cuda_error(FAILED)
    if settings.exclusive() and alive:
        settings.log(f"busy gpu={gpu} alive={alive}")
        raise cuda_error(BUSY)
    most = settings.most_contexts()
    if most and alive >= most:
        settings.log(f"no_memory gpu={gpu} alive={alive}")
        raise cuda_error(NO_MEMORY)
    file = open(folder / f"{os.getpid()}.context", "w")  # noqa: SIM115  # open until the end
    fcntl.flock(file, fcntl.LOCK_EX)
    _held[gpu] = file
    settings.log(f"context gpu={gpu} alive={alive}")


def processes(gpu: int) -> list[int]:
    """The processes that have a context on a physical GPU; files of dead ones are removed."""
    found = []
    for path in sorted((settings.folder() / f"gpu{gpu}").glob("*.context")):
        if gpu in _held and path.stem == str(os.getpid()):
            found.append(os.getpid())
            continue
        with suppress(FileNotFoundError), open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(int(path.stem))
            else:
                path.unlink()
    return found


def lost(gpu: int) -> bool:
    """True if the GPU has died: it dies once it has seen the number of contexts in PRETEND_LOST."""
    dying = settings.lost()
    if dying is None or dying[0] != gpu:
        return False
    log = settings.folder() / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    return sum(f" context gpu={gpu} " in line for line in lines) >= dying[1]


def check_alive() -> None:
    """Raise what CUDA raises if a GPU on which this process has a context has died."""
    if any(map(lost, _held)):
        raise cuda_error(FAILED)


def forget() -> None:
    """In a fork: the contexts belong to the parent."""
    _held.clear()
