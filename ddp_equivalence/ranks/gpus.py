"""The GPUs of this machine, as the driver's management library (NVML) describes them.

NVML is asked through the optional package nvidia-ml-py. CUDA is never asked here: a context in the
judging process would take some 500 MB of the GPU's memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import combinations
from types import ModuleType
from typing import Any

import torch

# Which GPUs CUDA_VISIBLE_DEVICES leaves to a process, by the rules of NVIDIA's CUDA manual.


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a process with CUDA_VISIBLE_DEVICES=visible may use, in CUDA's order.

    ``visible``: None if the variable is not set. It holds indices, UUIDs or the beginnings of
    UUIDs, of GPUs or of instances of divided GPUs (MIG). As for CUDA, an entry that names no GPU,
    or more than one, ends the list, and a GPU that is named twice empties it. An index is taken as
    NVML's; see ``Gpu.index``. For an instance the divided GPU is returned.
    """
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    names: list[str] = []
    for entry in visible.split(","):
        named = _named(gpus, entry.strip())
        if named is None:
            break
        name, gpu = named
        if name in names:
            return ()
        names.append(name)
        chosen.append(gpu)
    return tuple(chosen)


def plain_uuid(uuid: str) -> str:
    """A GPU's UUID without "GPU-" and in small letters: NVML writes these, and torch does not."""
    return uuid.lower().removeprefix("gpu-")


def _named(gpus: Sequence[Gpu], entry: str) -> tuple[str, Gpu] | None:
    """The UUID, or else the index, of what this entry names, and the GPU that it belongs to."""
    if entry.startswith(("GPU-", "MIG-")):
        found = [
            (uuid, gpu)
            for gpu in gpus
            for uuid in (gpu.uuid or "", *gpu.mig_uuids)
            if uuid.startswith(entry)
        ]
        return found[0] if len(found) == 1 else None
    number = re.match(r"\+?\d+", entry)  # CUDA reads "1st" as 1
    if number is None:
        return None
    index = int(number.group())
    gpu = next((gpu for gpu in gpus if gpu.index == index), None)
    return None if gpu is None else (gpu.uuid or str(index), gpu)


# What NVML says of the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES.

EXCLUSIVE = "exclusive_process"
"""The compute mode in which only one process at a time can use a GPU."""


@lru_cache(maxsize=4)
def gpus_by_name(devices: tuple[str, ...]) -> dict[str, Gpu]:
    """Device -> its GPU, as it was when this was first asked, where NVML knows it."""
    if not devices:
        return {}
    found = visible_gpus(gpus().gpus, ",".join(devices))
    return dict(zip(devices, found, strict=False))


def any_exclusive(devices: tuple[str, ...]) -> bool:
    """True if only one process at a time can use one of these GPUs. False if NVML does not say."""
    return any(gpu.compute_mode == EXCLUSIVE for gpu in gpus_by_name(devices).values())


# Whether ranks of NCCL can share the GPUs of this machine.
#
# NCCL refuses two ranks on one GPU only if both say that they are on the same host, so every rank
# says that it is on another one (``nccl_defaults`` in ranks/environment.py).

BYTES_PER_PROCESS = 600 * 2**20
"""About so much of a GPU's memory an idle rank holds: some 500 MB are its CUDA context with the
kernels of torch and its libraries, the rest are buffers of NCCL."""

EXCLUSIVE_NOTE = "EXCLUSIVE_PROCESS: one process each"


def why_not_shared(world_size: int, devices: tuple[str, ...]) -> str | None:
    """Why so many ranks of NCCL cannot share these GPUs, as a note; None if they can.

    What counts is the memory that a GPU has, and not what is free now: all processes of a run must
    come to the same answer. RCCL reads NCCL_HOSTID as NCCL does (``getHostHash`` in its utils.cc),
    so ranks may share AMD's GPUs as well, but nobody has tried that.
    """
    if any_exclusive(devices):
        return EXCLUSIVE_NOTE
    found = gpus_by_name(devices).values()
    if any(gpu.mig for gpu in found) or any(name.startswith("MIG-") for name in devices):
        return "MIG: nobody has tried ranks of NCCL that share an instance"
    if "NCCL_HOSTID" in os.environ:
        return "NCCL_HOSTID is set, so NCCL takes all ranks for ranks of one host"
    processes = -(-world_size // len(devices))
    memory = min((gpu.memory_total for gpu in found if gpu.memory_total), default=None)
    if memory is not None and processes * BYTES_PER_PROCESS > memory:
        needed, has = processes * BYTES_PER_PROCESS / 2**30, memory / 2**30
        return f"{processes} ranks on one GPU take about {needed:.1f} GiB, and it has {has:.1f}"
    return None


# What NVML says of the GPUs of this machine. A field is None where NVML did not say.


class NvmlState(StrEnum):
    """Whether NVML answered, and else why not, as a sentence."""

    ANSWERED = ""
    NO_PACKAGE = (
        "NVML was not asked, because nvidia-ml-py is not installed: pip install nvidia-ml-py"
    )
    NO_LIBRARY = "there is no NVIDIA driver here: its library libnvidia-ml.so.1 was not found"
    NO_DRIVER = "NVML says that the NVIDIA driver is not loaded"
    VERSION_MISMATCH = "NVML says that the driver and its library have different versions"
    NO_PERMISSION = (
        "NVML may not be used by this user: the device files /dev/nvidia* are not readable"
    )
    ROCM = "NVML was not asked, because it knows only NVIDIA's GPUs, and this torch is for ROCm"
    FAILED = "NVML failed"


@dataclass(frozen=True)
class GpuProcess:
    """A process that has a CUDA context on a GPU. In a container NVML may hide it."""

    pid: int
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    """One physical GPU. All amounts of memory are bytes.

    ``index``: its number in NVML, which counts in the order of PCI bus ids. CUDA counts in that
    order only if CUDA_DEVICE_ORDER=PCI_BUS_ID or if all GPUs are equally fast; ``uuid`` is the same
    in both. ``compute_mode``: "default", "exclusive_process" or "prohibited". ``mig``: whether the
    GPU is divided into instances (MIG); ``mig_uuids`` names these. ``processes``: None where NVML
    does not list them. ``problem``: why NVML knows nothing of this GPU, "" if it does.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    compute_mode: str | None = None
    mig: bool | None = None
    mig_uuids: tuple[str, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Link:
    """How two GPUs, given by their index in NVML, can reach each other's memory.

    ``p2p``: "ok", or why one cannot read the other's memory directly. ``nvlink``: whether NVLink
    connects them. ``path``: their way over PCI Express, named as by ``nvidia-smi topo -m``: PIX,
    PXB, PHB, NODE or SYS, from near to far; "SAME" for two GPUs on one board.
    """

    first: int
    second: int
    p2p: str | None
    nvlink: bool | None
    path: str | None


@dataclass(frozen=True)
class Gpus:
    """All GPUs that this machine or container has, whatever CUDA_VISIBLE_DEVICES says.

    ``driver``: its version, such as "580.65.06". ``cuda_of_driver``: the newest CUDA version that
    the driver can run, such as "13.0". ``links``: one for each pair of GPUs. ``problem``: "", or
    why NVML knows nothing.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_of_driver: str | None = None
    links: tuple[Link, ...] = ()
    nvml: NvmlState = NvmlState.ANSWERED
    problem: str = ""

    def link(self, first: int, second: int) -> Link | None:
        """The link between two GPUs, given by their index in NVML."""
        wanted = {first, second}
        return next((link for link in self.links if {link.first, link.second} == wanted), None)


# Asks NVML, through nvidia-ml-py, for the GPUs of this machine.
#
# The numbers of NVML's enums are those of NVIDIA's header nvml.h. They are written out here
# because not every version of nvidia-ml-py has them all: version 13.615 holds a tuple where
# NVML_P2P_CAPS_INDEX_READ should be 0.

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

STATES = {
    4: NvmlState.NO_PERMISSION,
    9: NvmlState.NO_DRIVER,
    12: NvmlState.NO_LIBRARY,
    18: NvmlState.VERSION_MISMATCH,
}
"""NVML's error code when it is initialised -> the state."""


def gpus() -> Gpus:
    """What NVML says of this machine's GPUs now. Raises nothing.

    What NVML refuses to say, as it often does in containers and on divided GPUs, is None.
    """
    if torch.version.hip is not None:
        return _unknown(NvmlState.ROCM)
    try:
        import pynvml
    except ImportError:
        return _unknown(NvmlState.NO_PACKAGE)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        state = STATES.get(getattr(error, "value", None) or 0, NvmlState.FAILED)
        return _unknown(state, f": {error}" if state is NvmlState.FAILED else "")
    try:
        return _machine(_Nvml(pynvml))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _unknown(state: NvmlState, more: str = "") -> Gpus:
    return Gpus(nvml=state, problem=f"{state}{more}")


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
        return _unknown(NvmlState.FAILED, f" to count the GPUs: {nvml.error}")
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
        driver=nvml.ask("nvmlSystemGetDriverVersion"),
        cuda_of_driver=_cuda_version(nvml.ask("nvmlSystemGetCudaDriverVersion_v2")),
        links=tuple(_links(nvml, handles)),
    )


def _gpu(nvml: _Nvml, index: int, handle: Any) -> Gpu:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    pci = nvml.ask("nvmlDeviceGetPciInfo", handle)
    mig = nvml.ask("nvmlDeviceGetMigMode", handle)
    return Gpu(
        index=index,
        name=nvml.ask("nvmlDeviceGetName", handle),
        uuid=nvml.ask("nvmlDeviceGetUUID", handle),
        pci_bus_id=None if pci is None else pci.busId,
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
            yield from filter(None, [nvml.ask("nvmlDeviceGetUUID", instance)])


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
