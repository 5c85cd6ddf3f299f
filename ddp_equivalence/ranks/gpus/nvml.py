"""Asks NVML, through nvidia-ml-py, for the GPUs of this machine.

The numbers of NVML's enums are those of NVIDIA's header nvml.h. They are written out here because
not every version of nvidia-ml-py has them all: version 13.615 holds a tuple where
NVML_P2P_CAPS_INDEX_READ should be 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from types import ModuleType
from typing import Any

import torch

from ddp_equivalence.ranks.gpus.gpu import Gpu, GpuProcess, Gpus, Link, NvmlState

COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive_process"}
P2P_READ, P2P_NVLINK, P2P_OK = 0, 2, 0
P2P_STATUS = {
    P2P_OK: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the path over PCI Express does not support it",
    4: "the driver's settings switch it off",
    5: "not supported",
}
PATHS = {0: "SAME", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

PROBLEMS = {
    4: (
        NvmlState.NO_PERMISSION,
        "NVML may not be used by this user: the device files /dev/nvidia* are not readable",
    ),
    9: (
        NvmlState.NO_DRIVER,
        "NVML says that the NVIDIA driver is not loaded",
    ),
    12: (
        NvmlState.NO_LIBRARY,
        "there is no NVIDIA driver here: its library libnvidia-ml.so.1 was not found",
    ),
    18: (
        NvmlState.VERSION_MISMATCH,
        "NVML says that the driver and its library have different versions",
    ),
}
"""NVML's error code when it is initialised -> the state and the sentence for it."""

PACKAGE_MISSING = (
    "NVML was not asked, because nvidia-ml-py is not installed: pip install nvidia-ml-py"
)
ROCM = "NVML was not asked, because it knows only NVIDIA's GPUs, and this torch is built for ROCm"


def gpus() -> Gpus:
    """What NVML says of this machine's GPUs now. Raises nothing.

    What NVML refuses to say, as it often does in containers and on divided GPUs, is None.
    """
    if torch.version.hip is not None:
        return Gpus(nvml=NvmlState.ROCM, problem=ROCM)
    try:
        import pynvml
    except ImportError:
        return Gpus(nvml=NvmlState.NO_PACKAGE, problem=PACKAGE_MISSING)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        otherwise = NvmlState.FAILED, f"NVML could not be initialised: {error}"
        state, problem = PROBLEMS.get(getattr(error, "value", None) or 0, otherwise)
        return Gpus(nvml=state, problem=problem)
    try:
        return _machine(_Nvml(pynvml))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class _Nvml:
    """Calls functions of nvidia-ml-py by name. ``error``: the last one that NVML raised."""

    def __init__(self, pynvml: ModuleType) -> None:
        self._pynvml = pynvml
        self.error = ""

    def ask(self, function: str, *arguments: Any) -> Any:
        """What the function returns; None if NVML, or this version of nvidia-ml-py, refuses."""
        try:
            return getattr(self._pynvml, function)(*arguments)
        except (self._pynvml.NVMLError, AttributeError, UnicodeDecodeError) as error:
            self.error = str(error)
            return None


def _machine(nvml: _Nvml) -> Gpus:
    count = nvml.ask("nvmlDeviceGetCount")
    if count is None:
        problem = f"NVML could not count the GPUs: {nvml.error}"
        return Gpus(nvml=NvmlState.FAILED, problem=problem)
    handles = {}
    found = []
    for index in range(count):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            found.append(Gpu(index, problem=nvml.error))
        else:
            handles[index] = handle
            found.append(_gpu(nvml, index, handle))
    return Gpus(
        gpus=tuple(found),
        driver=_text(nvml.ask("nvmlSystemGetDriverVersion")),
        cuda_of_driver=_cuda_version(nvml.ask("nvmlSystemGetCudaDriverVersion_v2")),
        links=tuple(_links(nvml, handles)),
    )


def _gpu(nvml: _Nvml, index: int, handle: Any) -> Gpu:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    pci = nvml.ask("nvmlDeviceGetPciInfo", handle)
    mig = nvml.ask("nvmlDeviceGetMigMode", handle)
    return Gpu(
        index=index,
        name=_text(nvml.ask("nvmlDeviceGetName", handle)),
        uuid=_text(nvml.ask("nvmlDeviceGetUUID", handle)),
        pci_bus_id=None if pci is None else _text(pci.busId),
        compute_capability=_pair(nvml.ask("nvmlDeviceGetCudaComputeCapability", handle)),
        memory_total=None if memory is None else int(memory.total),
        memory_free=None if memory is None else int(memory.free),
        compute_mode=_compute_mode(nvml.ask("nvmlDeviceGetComputeMode", handle)),
        mig=None if mig is None else bool(mig[0]),
        mig_uuids=tuple(_mig_uuids(nvml, handle)) if mig is not None and mig[0] else (),
        processes=_processes(nvml, handle),
    )


def _mig_uuids(nvml: _Nvml, handle: Any) -> Iterator[str]:
    """The instances that exist; their numbers may have gaps."""
    for number in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if instance is not None:
            uuid = _text(nvml.ask("nvmlDeviceGetUUID", instance))
            if uuid is not None:
                yield uuid


def _processes(nvml: _Nvml, handle: Any) -> tuple[GpuProcess, ...] | None:
    running = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle)
    if running is None:
        return None
    return tuple(GpuProcess(int(one.pid), one.usedGpuMemory) for one in running)


def _links(nvml: _Nvml, handles: dict[int, Any]) -> Iterator[Link]:
    for first, second in combinations(handles, 2):
        pair = handles[first], handles[second]
        p2p = nvml.ask("nvmlDeviceGetP2PStatus", *pair, P2P_READ)
        nvlink = nvml.ask("nvmlDeviceGetP2PStatus", *pair, P2P_NVLINK)
        path = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", *pair)
        yield Link(
            first,
            second,
            p2p=None if p2p is None else P2P_STATUS.get(p2p, f"unknown (status {p2p})"),
            nvlink=None if nvlink is None else nvlink == P2P_OK,
            path=None if path is None else PATHS.get(path, f"unknown (level {path})"),
        )


def _compute_mode(mode: int | None) -> str | None:
    return None if mode is None else COMPUTE_MODES.get(mode, f"unknown (mode {mode})")


def _cuda_version(version: int | None) -> str | None:
    """13000 stands for "13.0", and 12080 for "12.8"."""
    return None if version is None else f"{version // 1000}.{version % 1000 // 10}"


def _pair(values: Any) -> tuple[int, int] | None:
    return None if values is None else (int(values[0]), int(values[1]))


def _text(value: Any) -> str | None:
    """Some versions of nvidia-ml-py return bytes."""
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
