"""Which rank a process of a script is."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STACKS = "stacks.txt"


def rank_of_process() -> int:
    """The rank in the group of all, or the one that a launcher has told."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of ranks in that group, or the one that a launcher has told."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def facts_of_process(folder: Path) -> dict[str, Any]:
    """What the process that judges is told of a rank's process. From now on, it also writes its
    stacks to the rank's folder on SIGUSR1, unless the script uses this signal itself.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, (folder / STACKS).open("w"))
    return {
        "world_size": world_size(),
        "process": os.getpid(),
        "argv": sys.argv,
        "executable": sys.executable,
        "main": str(getattr(sys.modules.get("__main__"), "__file__", "") or ""),
        "in_group": dist.is_available() and dist.is_initialized(),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", 0)),
        "backend": _backend(),
    }


def _backend() -> str:
    """The backend of the group of all for the devices that it trains on; "" without a group.

    A script that names none has one for each kind of device, such as ``cpu:gloo,cuda:nccl``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    config = str(dist.get_backend_config())
    by_device = dict(one.partition(":")[::2] for one in config.split(","))
    device = "cuda" if "cuda" in by_device and torch.cuda.is_available() else "cpu"
    return by_device.get(device) or dist.get_backend()
