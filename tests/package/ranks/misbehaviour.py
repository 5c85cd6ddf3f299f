"""The ways in which a rank can misbehave, each with what the report must say about it."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MOMENTS = ("construction", "forward", "backward", "collective", "after")


@dataclass(frozen=True)
class Misbehaviour:
    """One way to misbehave.

    ``message``: a part of the report, in which RANK stands for the number of the misbehaving rank.
    ``outcome``: the verdict's. ``moments``: when a rank can misbehave in this way.
    ``wrong_collective``: the rank calls other collectives than the others, and the report says one
    of ``COLLECTIVE_MESSAGES``. ``hangs``: only the deadline ends it.
    """

    name: str
    message: str = ""
    outcome: str = "unknown"
    moments: tuple[str, ...] = MOMENTS
    wrong_collective: bool = False
    hangs: bool = False

    def is_named(self, report: str, rank: int) -> bool:
        """True if the report, joined to one line, names this misbehaviour and the rank."""
        pattern = COLLECTIVE_MESSAGES if self.wrong_collective else re.escape(self.message)
        return re.search(pattern.replace("RANK", str(rank)), report) is not None


CAUSE = "Root cause: rank RANK (node 0, local rank RANK) "
COLLECTIVE_MESSAGES = (
    r"rank RANK calls|Rank RANK waits in [^.]+, for rank \d, which has finished"
    r"|Rank RANK is running collective"
)

MISBEHAVIOURS = {
    misbehaviour.name: misbehaviour
    for misbehaviour in (
        Misbehaviour("raise", CAUSE + "ValueError: no such thing"),
        Misbehaviour("sys.exit(0)", CAUSE + "SystemExit: 0"),
        Misbehaviour("sys.exit(3)", CAUSE + "SystemExit: 3"),
        Misbehaviour("os._exit(0)", CAUSE + "ended without a result, exit code 0"),
        Misbehaviour("SIGKILL", CAUSE + "killed by SIGKILL (out of memory?"),
        Misbehaviour("SIGSEGV", CAUSE + "killed by SIGSEGV"),
        Misbehaviour("SIGABRT", CAUSE + "killed by SIGABRT"),
        Misbehaviour("SIGSTOP", CAUSE + "is stopped by a signal (SIGSTOP?)", hangs=True),
        Misbehaviour("endless loop", CAUSE + "still running", hangs=True),
        Misbehaviour("GIL held", CAUSE + "still running", hangs=True),
        Misbehaviour("collective of its own", wrong_collective=True),
        Misbehaviour("other op", wrong_collective=True),
        Misbehaviour("other shape", wrong_collective=True),
        Misbehaviour("other dtype", wrong_collective=True),
        Misbehaviour("collective not waited for", CAUSE + "1 collective that", moments=("after",)),
        Misbehaviour("result that cannot be pickled", CAUSE + "TypeError", moments=("after",)),
        Misbehaviour(
            "result of 1 GB", "rank RANK: more is not a parameter", "different", ("after",)
        ),
        Misbehaviour("100 MB of output", CAUSE + "wrote "),
        Misbehaviour("default dtype", CAUSE + "torch's default dtype changed", moments=("after",)),
        Misbehaviour("seed", CAUSE + "torch's seed set to 99"),
        Misbehaviour("environment", CAUSE + "environment variable CHANGED_BY_A_STEP set"),
        Misbehaviour("daemon thread", CAUSE + "thread 'left behind' left running"),
        Misbehaviour("child process", CAUSE + "child process"),
        Misbehaviour("child in another session", CAUSE + "child process"),
        Misbehaviour(
            "DDP outlives its group",
            CAUSE + "process group destroyed while a DistributedDataParallel was alive",
            moments=("after",),
        ),
    )
}


def act(name: str, misbehaves: bool, model: nn.Module) -> Any:
    """Misbehave on the rank that ``misbehaves``; do on the others what belongs to it.

    The others call the right collective where the misbehaving rank calls a wrong one. Returns what
    the step is to return.
    """
    if name in _COLLECTIVES:
        return _COLLECTIVES[name](misbehaves)
    return _ACTIONS[name](model) if misbehaves else None


def _raise(_: nn.Module) -> None:
    raise ValueError("no such thing")


def _loop_forever(_: nn.Module) -> None:
    while True:
        pass


def _send_signal(number: int) -> Any:
    return lambda _: os.kill(os.getpid(), number)


def _print_100_megabytes(_: nn.Module) -> None:
    line = "x" * 1023 + "\n"
    for _line in range(100 * 1024):
        sys.stdout.write(line)


def _hold_interpreter_lock(_: nn.Module) -> None:
    deque(itertools.repeat(None), maxlen=0)


def _change_default_dtype(_: nn.Module) -> None:
    torch.set_default_dtype(torch.float16)


def _set_seed(_: nn.Module) -> None:
    torch.manual_seed(99)


def _set_variable(_: nn.Module) -> None:
    os.environ["CHANGED_BY_A_STEP"] = "1"


def _leave_thread(_: nn.Module) -> None:
    threading.Thread(target=time.sleep, args=(1000,), name="left behind", daemon=True).start()


def _leave_child(_: nn.Module) -> None:
    _child_processes.append(subprocess.Popen(["sleep", "1000"]))


def _leave_child_in_another_session(_: nn.Module) -> None:
    _child_processes.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))


_child_processes: list[Any] = []


def _return_unpicklable(model: nn.Module) -> Any:
    return {"weight": (parameter for parameter in model.parameters())}


def _return_1_gigabyte(model: nn.Module) -> Any:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients | {"more": torch.empty(2**30 // 8, dtype=torch.float64)}


def _destroy_group(_: nn.Module) -> None:
    dist.destroy_process_group()  # while the step still holds its wrapper


_ACTIONS: dict[str, Any] = {
    "raise": _raise,
    "sys.exit(0)": lambda _: sys.exit(0),
    "sys.exit(3)": lambda _: sys.exit(3),
    "os._exit(0)": lambda _: os._exit(0),
    "SIGKILL": _send_signal(signal.SIGKILL),
    "SIGSEGV": _send_signal(signal.SIGSEGV),
    "SIGABRT": lambda _: ctypes.CDLL(None).abort(),
    "SIGSTOP": _send_signal(signal.SIGSTOP),
    "endless loop": _loop_forever,
    "GIL held": _hold_interpreter_lock,
    "result that cannot be pickled": _return_unpicklable,
    "result of 1 GB": _return_1_gigabyte,
    "100 MB of output": _print_100_megabytes,
    "default dtype": _change_default_dtype,
    "seed": _set_seed,
    "environment": _set_variable,
    "daemon thread": _leave_thread,
    "child process": _leave_child,
    "child in another session": _leave_child_in_another_session,
    "DDP outlives its group": _destroy_group,
}

_COLLECTIVES: dict[str, Any] = {
    "collective of its own": lambda misbehaves: (
        dist.all_reduce(torch.zeros(3)) if misbehaves else None
    ),
    "collective not waited for": lambda misbehaves: (
        [dist.all_reduce(torch.zeros(3), async_op=True)].clear() if misbehaves else None
    ),
    "other op": lambda misbehaves: (
        dist.broadcast(torch.zeros(3), 0) if misbehaves else _all_reduce(3)
    ),
    "other shape": lambda misbehaves: _all_reduce(5) if misbehaves else _all_reduce(3),
    "other dtype": lambda misbehaves: (
        _all_reduce(3, torch.float64) if misbehaves else _all_reduce(3)
    ),
}


def _all_reduce(elements: int, dtype: torch.dtype = torch.float32) -> None:
    dist.all_reduce(torch.zeros(elements, dtype=dtype))
