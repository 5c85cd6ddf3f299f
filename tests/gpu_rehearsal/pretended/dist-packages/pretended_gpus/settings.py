"""What the pretended GPUs are like. All of it comes from the environment, which ranks inherit."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "Pretended GPU (rehearsed)"
MEMORY = 80 * 2**30
CONTEXT_MEMORY = 500 * 2**20
CAPABILITY = (9, 0)
CUDA = "13.0"
DRIVER = "580.65.06"
NCCL = (2, 29, 7)

FOLDER = "PRETEND_FOLDER"


def gpus() -> int:
    """The number of GPUs of the pretended machine."""
    return int(os.environ["PRETEND_GPUS"])


def folder() -> Path:
    """The folder of the locks that stand for CUDA contexts, and of the log."""
    return Path(os.environ[FOLDER])


def exclusive() -> bool:
    """True if every GPU is in compute mode EXCLUSIVE_PROCESS."""
    return _is_on("EXCLUSIVE")


def most_contexts() -> int:
    """The number of CUDA contexts that the memory of a GPU has room for; 0 is any number."""
    return int(os.environ.get("PRETEND_CONTEXTS") or 0)


def other_masks() -> bool:
    """True if random numbers of a GPU are not those of the CPU for the same seed."""
    return _is_on("GENERATOR")


def deferred() -> bool:
    """True if a collective's result is there only after it was waited for, as with NCCL."""
    return _is_on("DEFERRED")


def strict() -> bool:
    """True if tensors know their device, and mixing devices raises."""
    return _is_on("STRICT")


def mig() -> bool:
    """True if every GPU is divided into MIG devices."""
    return _is_on("MIG")


def nvml() -> str:
    """What NVML does: "answers", or its library is "missing", or there is a "mismatch"."""
    return os.environ.get("PRETEND_NVML") or "answers"


def lost() -> tuple[int, int] | None:
    """(physical GPU, the number of contexts that it lives to see), if one is to die."""
    text = os.environ.get("PRETEND_LOST")
    if not text:
        return None
    gpu, _, contexts = text.partition("@")
    return int(gpu), int(contexts or 0)


def _is_on(name: str) -> bool:
    return os.environ.get(f"PRETEND_{name}", "") not in ("", "0")


def on_rank() -> bool:
    """True in a process, or during work of a process, that is a rank."""
    return "RANK" in os.environ


def log(text: str) -> None:
    """Add one line to the log of the rehearsal."""
    line = f"{os.getpid()} rank={os.environ.get('RANK', '-')} {text}\n"
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / "log", "a") as file:
        file.write(line)
