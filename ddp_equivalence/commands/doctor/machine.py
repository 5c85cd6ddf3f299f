"""The facts about this machine that the doctor's problems are worked out from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_equivalence.ranks.gpus import Gpus, gpus
from ddp_equivalence.ranks.lanes import cuda_devices

SHARED_MEMORY = "/dev/shm"
DEVICE_FILES = "nvidia[0-9]*"
AMD_DEVICE_FILE = "kfd"


@dataclass(frozen=True)
class Machine:
    """``gpus``: what NVML says. ``torch_cuda`` and ``torch_hip``: what this torch is built for.

    ``devices``: the CUDA devices that ranks may use. ``variable``: the environment variable that
    can name them. ``visible``: its value, None if it is not set. ``shared_memory``: the size of
    /dev/shm in bytes, None if there is none. ``device_files``: those of GPUs in /dev, such as
    "nvidia0"; AMD's is "kfd".
    """

    gpus: Gpus
    torch_version: str
    torch_cuda: str | None
    torch_hip: str | None
    devices: Sequence[str]
    variable: str
    visible: str | None
    shared_memory: int | None
    device_files: Sequence[str]


def this_machine() -> Machine:
    """The machine that this process runs on. CUDA is not initialised."""
    variable = "CUDA_VISIBLE_DEVICES" if torch.version.hip is None else "HIP_VISIBLE_DEVICES"
    return Machine(
        gpus=gpus(),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        devices=cuda_devices(),
        variable=variable,
        visible=os.environ.get(variable),
        shared_memory=_size(SHARED_MEMORY),
        device_files=_device_files(),
    )


def _size(folder: str) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks


def _device_files() -> tuple[str, ...]:
    folder = Path("/dev")
    files = [*folder.glob(DEVICE_FILES), *folder.glob(AMD_DEVICE_FILE)]
    return tuple(sorted(file.name for file in files))
