"""Which GPUs this process may use, how many processes may share one, and which one a device is."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpus import BYTES_PER_PROCESS, EXCLUSIVE, gpus_by_name
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, devices_of_ranks

# How many processes of a run may be on each GPU at once, and how to see that there were too many.
#
# A process on a GPU holds a CUDA context there until it ends, also while it is idle.

SHARE_OF_MEMORY = 1 / 4
"""The ranks of a run together hold at most this share of a GPU's memory before they do any work.
The rest is for the models that are checked, and for other users of the GPU."""

WITHOUT_NVML = 8
"""The most processes on a GPU whose memory is not known: they fit into 5 GB."""

WORKERS_VARIABLE = "PYTEST_XDIST_WORKER_COUNT"
"""pytest-xdist sets this variable in its workers, which all have idle ranks of their own."""

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""CUDA, torch, NCCL, cuBLAS and cuDNN write one of these where a GPU has no memory left."""

BUSY = ("busy or unavailable",)
"""Part of CUDA's error if another process uses a GPU whose compute mode is EXCLUSIVE_PROCESS."""


@dataclass(frozen=True)
class GpuRoom:
    """``most``: GPU -> the most processes of this pytest process that may be on it at once.

    ``exclusive``: the GPUs that only one process at a time can use, also those where CUDA has
    refused a second one.
    """

    most: dict[str, int]
    exclusive: set[str] = field(default_factory=set)

    def most_on(self, device: str) -> int:
        """The most processes that may be on this GPU, with those that are about to start."""
        return 1 if device in self.exclusive else self.most.get(device, WITHOUT_NVML)


@lru_cache(maxsize=1)
def gpu_room() -> GpuRoom:
    """The room on the GPUs of this machine, from what NVML says of their memory and mode."""
    workers = int(os.environ.get(WORKERS_VARIABLE, "1"))
    devices = cuda_devices()
    most = dict.fromkeys(devices, max(1, WITHOUT_NVML // workers))
    exclusive: set[str] = set()
    for device, gpu in gpus_by_name(devices).items():
        if gpu.memory_total is not None and not gpu.mig:
            processes = int(gpu.memory_total * SHARE_OF_MEMORY / BYTES_PER_PROCESS)
            most[device] = max(1, processes // workers)
        if gpu.compute_mode == EXCLUSIVE:
            exclusive.add(device)
    return GpuRoom(most, exclusive)


def processes_by_gpu(layout: Layout, lane: Lane, devices: tuple[str, ...]) -> Counter[str]:
    """GPU -> the number of these ranks that have a context there; empty on the CPU."""
    names = devices_of_ranks(layout, lane, devices).values()
    return Counter(name for of_rank in names for name in of_rank.split(","))


def failed_with(error: RankFailed, phrases: Iterable[str]) -> bool:
    """True if the ranks failed because one of them raised an error with one of these phrases."""
    texts = [str(error), *(end.what for end in error.ends)]
    return any(phrase in text for text in texts for phrase in phrases)


# Says which GPU of the machine a CUDA device of this process is.
#
# Every rank sees only the GPUs of its own simulated node, so ``cuda:0`` names another GPU on
# another rank. A GPU has one UUID in every process.

SEVERAL = "+"
"""Stands between the UUIDs of the GPUs of one rank that has used several."""


def gpus_of(devices: Iterable[torch.device]) -> str:
    """The UUIDs of the CUDA devices among these, as ``nvidia-smi -L`` shows them.

    Several are in the order of their numbers, with ``SEVERAL`` between them; "" if there are none.
    """
    cuda = {device for device in devices if device.type == "cuda"}
    ordered = sorted(cuda, key=lambda device: device.index or 0)
    return SEVERAL.join(dict.fromkeys(map(_uuid, ordered)))


def _uuid(device: torch.device) -> str:
    # Torch leaves out the prefix that NVML and CUDA_VISIBLE_DEVICES use.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    # CUDA gives a process one instance of a GPU (MIG), and only if it is named here.
    is_instance = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    prefix = "MIG-" if is_instance else "GPU-"
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"{prefix}{uuid}"
