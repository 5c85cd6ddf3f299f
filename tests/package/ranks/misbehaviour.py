"""What a rank can do wrong, each with what the report must say of it."""

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

from ddp_equivalence import Rank

MOMENTS = ("construction", "forward", "backward", "collective", "after")


@dataclass(frozen=True)
class Fault:
    """``says``: a part of the report; RANK stands for the number of the rank that did it.

    ``calls``: it is the rank's collectives that are wrong, which the report tells in other words.
    ``hangs``: only the deadline ends it.
    """

    name: str
    says: str = ""
    outcome: str = "unknown"
    moments: tuple[str, ...] = MOMENTS
    calls: bool = False
    hangs: bool = False

    def is_named(self, report: str, rank: int) -> bool:
        """True if the report, on one line, names this fault and the rank."""
        pattern = CALLS if self.calls else re.escape(self.says)
        return re.search(pattern.replace("RANK", str(rank)), report) is not None


CAUSE = "Root cause: rank RANK (node 0, local rank RANK) "
CALLS = (
    r"rank RANK calls|Rank RANK waits in [^.]+, for rank \d, which has finished"
    r"|Rank RANK is running collective"
)

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("raise", CAUSE + "ValueError: no such thing"),
        Fault("sys.exit(0)", CAUSE + "SystemExit: 0"),
        Fault("sys.exit(3)", CAUSE + "SystemExit: 3"),
        Fault("os._exit(0)", CAUSE + "ended without a result, exit code 0"),
        Fault("SIGKILL", CAUSE + "killed by SIGKILL (out of memory?"),
        Fault("SIGSEGV", CAUSE + "killed by SIGSEGV"),
        Fault("SIGABRT", CAUSE + "killed by SIGABRT"),
        Fault("SIGSTOP", CAUSE + "is stopped by a signal (SIGSTOP?)", hangs=True),
        Fault("endless loop", CAUSE + "still running", hangs=True),
        Fault("GIL held", CAUSE + "still running", hangs=True),
        Fault("collective of its own", calls=True),
        Fault("other op", calls=True),
        Fault("other shape", calls=True),
        Fault("other dtype", calls=True),
        Fault("collective not waited for", CAUSE + "1 collective that", moments=("after",)),
        Fault("result that cannot be pickled", CAUSE + "TypeError", moments=("after",)),
        Fault("result of 1 GB", "rank RANK: more is not a parameter", "different", ("after",)),
        Fault("100 MB of output", CAUSE + "wrote "),
        Fault("default dtype", CAUSE + "torch's default dtype changed", moments=("after",)),
        Fault("seed", CAUSE + "torch's seed set to 99"),
        Fault("environment", CAUSE + "environment variable CHANGED_BY_A_STEP set"),
        Fault("daemon thread", CAUSE + "thread 'left behind' left running"),
        Fault("child process", CAUSE + "child process"),
        Fault("child in another session", CAUSE + "child process"),
        Fault(
            "DDP outlives its group",
            CAUSE + "process group destroyed while a DistributedDataParallel was alive",
            moments=("after",),
        ),
    )
}


def act(fault: str, mine: bool, rank: Rank, model: nn.Module) -> Any:
    """What this rank does: wrong if the fault is ``mine``, else what goes with it."""
    if fault in _OPS:
        return _OPS[fault](mine)
    return _ACTS[fault](model) if mine else None


def _raise(_: nn.Module) -> None:
    raise ValueError("no such thing")


def _loop(_: nn.Module) -> None:
    while True:
        pass


def _signal(number: int) -> Any:
    return lambda _: os.kill(os.getpid(), number)


def _print(_: nn.Module) -> None:
    line = "x" * 1023 + "\n"
    for _line in range(100 * 1024):
        sys.stdout.write(line)


def _hold_the_lock(_: nn.Module) -> None:
    deque(itertools.repeat(None), maxlen=0)


def _default_dtype(_: nn.Module) -> None:
    torch.set_default_dtype(torch.float16)


def _seed(_: nn.Module) -> None:
    torch.manual_seed(99)


def _environment(_: nn.Module) -> None:
    os.environ["CHANGED_BY_A_STEP"] = "1"


def _thread(_: nn.Module) -> None:
    threading.Thread(target=time.sleep, args=(1000,), name="left behind", daemon=True).start()


def _child(_: nn.Module) -> None:
    _kept.append(subprocess.Popen(["sleep", "1000"]))


def _child_apart(_: nn.Module) -> None:
    _kept.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))


_kept: list[Any] = []


def _unpicklable(model: nn.Module) -> Any:
    return {"weight": (one for one in model.parameters())}


def _large(model: nn.Module) -> Any:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {"more": torch.empty(2**30 // 8, dtype=torch.float64)}


def _outlive(_: nn.Module) -> None:
    dist.destroy_process_group()  # while the step still holds its wrapper


_ACTS: dict[str, Any] = {
    "raise": _raise,
    "sys.exit(0)": lambda _: sys.exit(0),
    "sys.exit(3)": lambda _: sys.exit(3),
    "os._exit(0)": lambda _: os._exit(0),
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGABRT": lambda _: ctypes.CDLL(None).abort(),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "endless loop": _loop,
    "GIL held": _hold_the_lock,
    "result that cannot be pickled": _unpicklable,
    "result of 1 GB": _large,
    "100 MB of output": _print,
    "default dtype": _default_dtype,
    "seed": _seed,
    "environment": _environment,
    "daemon thread": _thread,
    "child process": _child,
    "child in another session": _child_apart,
    "DDP outlives its group": _outlive,
}

_OPS: dict[str, Any] = {
    "collective of its own": lambda mine: dist.all_reduce(torch.zeros(3)) if mine else None,
    "collective not waited for": lambda mine: (
        [dist.all_reduce(torch.zeros(3), async_op=True)].clear() if mine else None
    ),
    "other op": lambda mine: dist.broadcast(torch.zeros(3), 0) if mine else _reduce(3),
    "other shape": lambda mine: _reduce(5) if mine else _reduce(3),
    "other dtype": lambda mine: _reduce(3, torch.float64) if mine else _reduce(3),
}


def _reduce(elements: int, dtype: torch.dtype = torch.float32) -> None:
    dist.all_reduce(torch.zeros(elements, dtype=dtype))
