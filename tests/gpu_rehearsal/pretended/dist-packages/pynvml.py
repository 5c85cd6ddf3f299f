"""Stands for nvidia-ml-py: what NVML says of the pretended GPUs.

It has the functions that ddp_equivalence calls. The numbers of the enums are those of NVIDIA's
header nvml.h.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from pretended_gpus import contexts, settings, visible

UNINITIALIZED, INVALID_ARGUMENT, NOT_FOUND, LIBRARY_NOT_FOUND, GPU_IS_LOST, MISMATCH = (
    *(1, 2, 6, 12, 15, 18),
)
EXCLUSIVE_PROCESS, MODE_DEFAULT = 3, 0
PATH_OF_A_PAIR, PATH_TO_THE_OTHER_HALF = 20, 50
"""PXB, and SYS: as on a machine with two processors, each with half of the GPUs."""

MIG_DEVICES = 7

TEXTS = {
    UNINITIALIZED: "Uninitialized",
    INVALID_ARGUMENT: "Invalid Argument",
    NOT_FOUND: "Not Found",
    LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    GPU_IS_LOST: "GPU is lost",
    MISMATCH: "Driver/library version mismatch",
}

_started: list[bool] = []


class NVMLError(Exception):
    """An error of NVML. ``value``: its number."""

    def __init__(self, value: int) -> None:
        super().__init__(TEXTS[value])
        self.value = value


def nvmlInit() -> None:  # noqa: N802  # the names are those of nvidia-ml-py
    if not os.environ.get("PRETEND_GPUS") or settings.nvml() == "missing":
        raise NVMLError(LIBRARY_NOT_FOUND)
    if settings.nvml() == "mismatch":
        raise NVMLError(MISMATCH)
    _started.append(True)


def nvmlShutdown() -> None:  # noqa: N802
    if not _started:
        raise NVMLError(UNINITIALIZED)
    _started.pop()


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return settings.gpus()


def nvmlDeviceGetHandleByIndex(index: int) -> Any:  # noqa: N802
    if not _started:
        raise NVMLError(UNINITIALIZED)
    if not 0 <= index < settings.gpus():
        raise NVMLError(INVALID_ARGUMENT)
    if contexts.lost(index):
        raise NVMLError(GPU_IS_LOST)
    return SimpleNamespace(gpu=index, instance=None)


def nvmlDeviceGetName(handle: Any) -> str:  # noqa: N802
    return settings.NAME


def nvmlDeviceGetUUID(handle: Any) -> str:  # noqa: N802
    if handle.instance is not None:
        return visible.mig_uuid(handle.gpu, handle.instance)
    return f"GPU-{visible.uuid(handle.gpu)}"


def nvmlDeviceGetMemoryInfo(handle: Any) -> Any:  # noqa: N802
    used = len(contexts.processes(handle.gpu)) * settings.CONTEXT_MEMORY
    return SimpleNamespace(total=settings.MEMORY, used=used, free=settings.MEMORY - used)


def nvmlDeviceGetPciInfo(handle: Any) -> Any:  # noqa: N802
    return SimpleNamespace(busId=f"00000000:{handle.gpu + 1:02X}:00.0")


def nvmlDeviceGetCudaComputeCapability(handle: Any) -> tuple[int, int]:  # noqa: N802
    return settings.CAPABILITY


def nvmlDeviceGetComputeMode(handle: Any) -> int:  # noqa: N802
    return EXCLUSIVE_PROCESS if settings.exclusive() else MODE_DEFAULT


def nvmlDeviceGetMigMode(handle: Any) -> list[int]:  # noqa: N802
    return [int(settings.mig()), int(settings.mig())]


def nvmlDeviceGetMaxMigDeviceCount(handle: Any) -> int:  # noqa: N802
    return MIG_DEVICES


def nvmlDeviceGetMigDeviceHandleByIndex(handle: Any, number: int) -> Any:  # noqa: N802
    if not 0 <= number < visible.MIG_DEVICES:
        raise NVMLError(NOT_FOUND)
    return SimpleNamespace(gpu=handle.gpu, instance=number)


def nvmlDeviceGetComputeRunningProcesses(handle: Any) -> list[Any]:  # noqa: N802
    found = contexts.processes(handle.gpu)
    return [SimpleNamespace(pid=pid, usedGpuMemory=settings.CONTEXT_MEMORY) for pid in found]


def nvmlDeviceGetP2PStatus(first: Any, second: Any, what: int) -> int:  # noqa: N802
    return 0


def nvmlDeviceGetTopologyCommonAncestor(first: Any, second: Any) -> int:  # noqa: N802
    half = max(2, settings.gpus() // 2)
    same = first.gpu // half == second.gpu // half
    return PATH_OF_A_PAIR if same else PATH_TO_THE_OTHER_HALF


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return settings.DRIVER


def nvmlSystemGetCudaDriverVersion_v2() -> int:  # noqa: N802
    major, minor = map(int, settings.CUDA.split("."))
    return major * 1000 + minor * 10
