"""What NVML says of the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from functools import lru_cache

from ddp_equivalence.ranks.gpus.gpu import Gpu
from ddp_equivalence.ranks.gpus.nvml import gpus
from ddp_equivalence.ranks.gpus.visible import visible_gpus

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
