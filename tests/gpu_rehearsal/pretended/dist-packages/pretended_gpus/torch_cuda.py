"""torch.cuda: how many devices there are, which is the current one, and what they are like."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl
from torch.torch_version import TorchVersion

from pretended_gpus import contexts, runtime, settings, visible


def install() -> None:
    """Replace the functions of torch.cuda and torch.accelerator about devices."""
    version: Any = torch.version
    version.cuda = settings.CUDA
    release = str(torch.__version__).partition("+")[0]
    version.__version__ = torch.__version__ = TorchVersion(f"{release}+rehearsed")
    _replace(torch.cuda, _of_devices() | _of_memory())
    torch.cuda.nccl.version = lambda: settings.NCCL
    _replace(
        torch.accelerator,
        {
            "is_available": lambda: runtime.count() > 0,
            "current_accelerator": lambda check_available=False: (
                torch.device("cuda") if runtime.count() else None
            ),
            "current_device_index": current_device,
            "set_device_index": set_device,
            "synchronize": synchronize,
            "device_index": torch.cuda.device,
        },
    )


def _replace(owner: Any, functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        setattr(owner, name, function if isinstance(function, type) else _copy_of(function))


def _copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's compiler wants each of torch's functions to be another object."""

    @wraps(function)
    def copy(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return copy


def _of_devices() -> dict[str, Any]:
    return {
        "_raw_device_count_nvml": nvml_count,
        "_raw_device_uuid_nvml": nvml_uuids,
        "is_available": lambda: runtime.count() > 0,
        "device_count": runtime.count,
        "is_initialized": runtime.is_initialised,
        "_is_in_bad_fork": lambda: runtime.state.is_bad_fork,
        "init": runtime.initialise,
        "_lazy_init": runtime.initialise,
        "set_device": set_device,
        "current_device": current_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "synchronize": synchronize,
        "get_device_properties": properties,
        "can_device_access_peer": lambda device, peer: device != peer,
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    }


def _of_memory() -> dict[str, Any]:
    return {
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": memory,
    }


def nvml_count() -> int:
    """As torch's, which warns and returns -1 if NVML does not answer."""
    if settings.nvml() == "missing":
        return -1
    if settings.nvml() == "mismatch":
        warnings.warn("Can't initialize NVML", stacklevel=1)
        return -1
    return settings.gpus()


def nvml_uuids() -> list[str] | None:
    return [f"GPU-{visible.uuid(gpu)}" for gpu in range(settings.gpus())]


def set_device(device: Any) -> None:
    runtime.set_current(runtime.index_of(device))


def current_device() -> int:
    runtime.initialise()
    return runtime.current()


def exchange_device(index: int) -> int:
    before = runtime.current()
    runtime.set_current(index)
    return before


def synchronize(device: Any = None) -> None:
    """Wait for all work of the device, also for that of collectives."""
    from pretended_gpus import collectives

    runtime.initialise()
    contexts.check_alive()
    collectives.finish_all()


def properties(device: Any = None) -> Any:
    runtime.initialise()
    index = runtime.index_of(device)
    if not 0 <= index < len(runtime.gpus()):
        raise AssertionError("Invalid device id")
    gpu = runtime.gpus()[index]
    return SimpleNamespace(
        name=settings.NAME,
        major=settings.CAPABILITY[0],
        minor=settings.CAPABILITY[1],
        total_memory=settings.MEMORY,
        multi_processor_count=132,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid=visible.uuid(gpu),
        pci_domain_id=0,
        pci_bus_id=gpu + 1,
        pci_device_id=0,
    )


def memory(device: Any = None) -> tuple[int, int]:
    runtime.initialise()
    contexts_there = len(contexts.processes(runtime.gpus()[runtime.index_of(device)]))
    return settings.MEMORY - contexts_there * settings.CONTEXT_MEMORY, settings.MEMORY
