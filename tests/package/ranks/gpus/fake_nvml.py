"""A stand-in for the module pynvml, which answers for GPUs that a test describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

NOT_SUPPORTED, GPU_IS_LOST = 3, 15
TEXTS = {NOT_SUPPORTED: "Not Supported", GPU_IS_LOST: "GPU is lost"}


class NVMLError(Exception):
    """As in pynvml: ``value`` is the error's number in nvml.h."""

    def __init__(self, value: int) -> None:
        super().__init__(TEXTS.get(value, f"error {value}"))
        self.value = value


@dataclass
class FakeGpu:
    """``refuses``: functions that raise NotSupported for this GPU. ``mig``: None is no support."""

    number: int
    mig: bool | None = False
    instances: Mapping[int, str] = field(default_factory=dict)
    compute_mode: int = 0
    capability: tuple[int, int] = (9, 0)
    free: int = 79 * 2**30
    processes: Sequence[tuple[int, int | None]] = ()
    refuses: Sequence[str] = ()
    lost: bool = False


def fake_nvml(
    *gpus: FakeGpu,
    init_error: int | None = None,
    driver: str = "580.65.06",
    cuda: int = 13000,
    p2p: Mapping[int, int] | None = None,
) -> ModuleType:
    """A module with the functions that the package calls; ``open`` counts inits less shutdowns.

    ``p2p``: NVML's P2P index -> status, for every pair.
    """
    module: Any = ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.open = 0

    def init() -> None:
        if init_error is not None:
            raise NVMLError(init_error)
        module.open += 1

    def shutdown() -> None:
        module.open -= 1

    def handle(index: int) -> FakeGpu:
        if gpus[index].lost:
            raise NVMLError(GPU_IS_LOST)
        return gpus[index]

    def instance(gpu: FakeGpu, number: int) -> str:
        if number not in gpu.instances:
            raise NVMLError(6)
        return gpu.instances[number]

    def p2p_status(first: FakeGpu, second: FakeGpu, index: int) -> int:
        if p2p is None:
            raise NVMLError(NOT_SUPPORTED)
        return p2p[index]

    def uuid(handle: FakeGpu | str) -> str:
        return handle if isinstance(handle, str) else f"GPU-{handle.number}abc0000-1111"

    def mig_mode(gpu: FakeGpu) -> list[int]:
        if gpu.mig is None:
            raise NVMLError(NOT_SUPPORTED)
        return [int(gpu.mig), int(gpu.mig)]

    of_a_gpu = {
        "nvmlDeviceGetName": lambda gpu: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:1{gpu.number}:00.0"),
        "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=80 * 2**30, free=gpu.free),
        "nvmlDeviceGetComputeMode": lambda gpu: gpu.compute_mode,
        "nvmlDeviceGetMigMode": mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": instance,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
            SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in gpu.processes
        ],
        "nvmlDeviceGetP2PStatus": p2p_status,
        "nvmlDeviceGetTopologyCommonAncestor": lambda first, second: 40,
    }
    for name, function in of_a_gpu.items():
        setattr(module, name, _refusing(name, function))
    module.nvmlInit, module.nvmlShutdown = init, shutdown
    module.nvmlDeviceGetCount = lambda: len(gpus)
    module.nvmlDeviceGetHandleByIndex = handle
    module.nvmlSystemGetDriverVersion = lambda: driver
    module.nvmlSystemGetCudaDriverVersion_v2 = lambda: cuda
    return module  # type: ignore[no-any-return]


def _refusing(name: str, function: Any) -> Any:
    def call(handle: Any, *arguments: Any) -> Any:
        if isinstance(handle, FakeGpu) and name in handle.refuses:
            raise NVMLError(NOT_SUPPORTED)
        return function(handle, *arguments)

    return call
