"""What NVML says of the GPUs of this machine. A field is None where NVML did not say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NvmlState(StrEnum):
    """Whether NVML answered, and why not. ``Gpus.problem`` says the same as a sentence."""

    ANSWERED = "answered"
    NO_PACKAGE = "nvidia-ml-py is not installed"
    NO_LIBRARY = "no NVML library"
    NO_DRIVER = "driver not loaded"
    VERSION_MISMATCH = "driver and library have different versions"
    NO_PERMISSION = "no permission"
    ROCM = "torch is built for ROCm"
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
