"""What to do about the failures that steps written for a training script often meet on ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hint:
    """``advice`` helps if the exception that a rank raised contains one of the ``phrases``."""

    phrases: tuple[str, ...]
    advice: str


HINTS = (
    Hint(
        ("trying to initialize the default process group twice",),
        "The ranks have a process group already: use DistributedDataParallel at once. To keep the "
        "call for your training script, write: if not dist.is_initialized(): "
        "dist.init_process_group(...)",
    ),
    Hint(
        ("Default process group has not been initialized",),
        "The step has destroyed the process group that every rank is given. Leave out "
        "destroy_process_group: the ranks end their group themselves.",
    ),
    Hint(
        ("BdbQuit", "EOFError: EOF when reading a line"),
        "This rank is a process of its own and has no terminal. With --in-process, or "
        "check(..., in_process=True), rank 0 is the process that you started, and a debugger works "
        "in it: if rank == 0: breakpoint()",
    ),
    Hint(
        ("Can't pickle local object", "Can't get local object"),
        "Worker processes that are started with spawn or forkserver can be sent no function or "
        "class that is defined inside a function. A training script would fail in the same way. "
        "Define it at the top of its file, or start the workers with fork.",
    ),
)


def hint_for(what: str) -> str:
    """The advice for an exception, given as text; "" if there is none."""
    for hint in HINTS:
        if any(phrase in what for phrase in hint.phrases):
            return hint.advice
    return ""
