"""A lane is a backend on a kind of device.

This module says which lanes this machine has, and why it does not have the others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.backend_names import BACKENDS


@dataclass(frozen=True)
class Lane:
    """The backend and the kind of device that a case runs on.

    ``gloo_fallback`` is gloo on the CPU, chosen because there are too few GPUs. ``reason`` says why
    this lane was chosen; it may be "".
    """

    name: str
    backend: str
    device_type: str
    reason: str = ""

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=1)
def cuda_devices() -> tuple[str, ...]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES would name them.

    They are counted through NVML, because the judging process must not initialise CUDA.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return ()
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return tuple(name.strip() for name in names[:count])


def missing(name: str, world_size: int) -> str | None:
    """The reason why lane ``name`` cannot run ``world_size`` ranks here; None if it can."""
    devices = len(cuda_devices())
    if name in ("gloo", "gloo_fallback"):
        return None if dist.is_gloo_available() else "this torch was built without gloo"
    if name == "gloo_cuda":
        return None if devices else "needs 1 CUDA device, found 0"
    if name == "data_parallel":
        # With a single device nn.DataParallel only calls the module.
        wanted = max(2, world_size)
        return None if devices >= wanted else f"needs {wanted} CUDA devices, found {devices}"
    if devices < world_size:
        noun = "device" if world_size == 1 else "devices"
        return f"needs {world_size} CUDA {noun} (one rank each), found {devices}"
    if not dist.is_backend_available(name):
        return f"torch {torch.__version__} has no backend {name}"
    return None


def choose(layout: Layout, backend: str = "auto") -> Lane:
    """The lane for a layout and a backend.

    ``auto`` is NCCL with one rank per GPU if there are enough GPUs, and gloo on the CPU otherwise.
    Raises BadCase for an unknown backend, or for one that cannot run the layout on this machine.
    """
    if backend not in BACKENDS:
        raise BadCase("backend", backend, f"one of {', '.join(BACKENDS)}")
    if backend == "auto":
        reason = missing("nccl", layout.world_size)
        if reason is None:
            return Lane("nccl", "nccl", "cuda")
        return Lane("gloo_fallback", "gloo", "cpu", reason)
    reason = missing(backend, layout.world_size)
    if reason is not None:
        raise BadCase("backend", backend, f"{reason}, for layout {layout}")
    if backend == "gloo":
        return Lane("gloo", "gloo", "cpu")
    if backend == "gloo_cuda":
        shared = layout.world_size > len(cuda_devices())
        return Lane("gloo_cuda", "gloo", "cuda", "ranks share GPUs" if shared else "")
    return Lane(backend, backend, "cuda")


def visible_devices(layout: Layout, lane: Lane, devices: tuple[str, ...]) -> dict[int, str]:
    """CUDA_VISIBLE_DEVICES for every rank: only the GPUs of its own simulated node.

    ``cuda:{local_rank}`` is then the rank's own GPU, as it would be on real nodes. If there are
    fewer GPUs than ranks, each rank sees one GPU. ``devices``: the GPUs that these ranks may use.
    """
    if lane.device_type != "cuda":
        return {row.rank: "" for row in layout.rows}
    if lane.name == "data_parallel":  # a single process drives all devices
        return {row.rank: ",".join(devices) for row in layout.rows}
    of_rank = {row.rank: devices[row.rank % len(devices)] for row in layout.rows}
    return {
        row.rank: ",".join(of_rank[rank] for rank in layout.ranks_on(row.node))
        if layout.world_size <= len(devices)
        else of_rank[row.rank]
        for row in layout.rows
    }


def device_of(local_rank: int, lane: Lane, visible: str) -> torch.device:
    """The device of a rank whose CUDA_VISIBLE_DEVICES is ``visible``."""
    if lane.device_type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % len(visible.split(",")))
