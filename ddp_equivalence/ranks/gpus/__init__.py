"""The GPUs of this machine, as the driver's management library (NVML) describes them.

NVML is asked through the optional package nvidia-ml-py. CUDA is never asked here: a context in the
judging process would take some 500 MB of the GPU's memory.
"""

from __future__ import annotations

from ddp_equivalence.ranks.gpus.nvml import (
    Gpu,
    GpuProcess,
    Gpus,
    Link,
    NvmlState,
    gpus,
    plain_uuid,
    visible_gpus,
)

__all__ = [
    "Gpu",
    "GpuProcess",
    "Gpus",
    "Link",
    "NvmlState",
    "gpus",
    "plain_uuid",
    "visible_gpus",
]
