"""Machines and states that the tests of the doctor are about."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.commands.doctor.examination import GpuAnswer, Machine, Outcome, State
from ddp_equivalence.ranks.gpus import Gpu, Gpus

GIB = 2**30


def gpu(index: int, **changed: Any) -> Gpu:
    """A GPU that nobody uses."""
    fields: dict[str, Any] = {
        "index": index,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-{index}abc",
        "compute_capability": (9, 0),
        "memory_total": 80 * GIB,
        "memory_free": 79 * GIB,
        "compute_mode": "default",
        "mig": False,
        "processes": (),
    }
    return Gpu(**fields | changed)


def box(*gpus: Gpu, **changed: Any) -> Machine:
    """A machine with these GPUs and nothing wrong."""
    nvml: dict[str, Any] = {"gpus": gpus, "driver": "580.65.06", "cuda_of_driver": "13.0"}
    for name in ("driver", "cuda_of_driver", "links", "nvml", "problem"):
        if name in changed:
            nvml[name] = changed.pop(name)
    fields: dict[str, Any] = {
        "gpus": Gpus(**nvml),
        "torch_version": "2.13.0",
        "torch_cuda": "13.0",
        "torch_hip": None,
        "devices": tuple(str(index) for index in range(len(gpus))),
        "variable": "CUDA_VISIBLE_DEVICES",
        "visible": None,
        "shared_memory": 64 * GIB,
        "device_files": tuple(f"nvidia{index}" for index in range(len(gpus))),
    }
    return Machine(**fields | changed)


def found(
    number: int,
    outcome: Outcome = Outcome.WORKS,
    error: str = "",
) -> State:
    """A GPU that was asked for a product."""
    answer = GpuAnswer("NVIDIA H100", f"{number}abc", error)
    known = None if outcome is Outcome.FAILED else answer
    return State(f"cuda:{number}", outcome, "text", error, str(number), known)
