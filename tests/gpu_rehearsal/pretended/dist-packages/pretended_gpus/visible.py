"""Which GPUs CUDA_VISIBLE_DEVICES shows, as CUDA reads it.

It lists indices, UUIDs or beginnings of UUIDs. CUDA shows those before the first that does not
exist, and none if one is listed twice. Of MIG devices a process sees only the first.
Source: "CUDA Environment Variables" in NVIDIA's CUDA C++ Programming Guide, and the MIG User Guide.
"""

from __future__ import annotations

import os

from pretended_gpus import settings

MIG_DEVICES = 2
"""The number of MIG devices of a GPU that is divided."""


def uuid(gpu: int) -> str:
    """The UUID of a physical GPU, without the prefix that nvidia-smi writes before it."""
    return f"{gpu:08x}-9e4e-0000-0000-{gpu:012x}"


def mig_uuid(gpu: int, instance: int) -> str:
    """The name of one MIG device of a physical GPU."""
    return f"MIG-{gpu:08x}-9e4e-0000-{instance:04x}-{gpu:012x}"


def visible() -> list[int]:
    """The physical GPU behind each of this process's CUDA devices, as the environment is now."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(settings.gpus()))
    found: list[int] = []
    for name in text.split(","):
        gpu = _physical(name.strip())
        if gpu is None:
            break
        found.append(gpu)
        if name.strip().startswith("MIG-"):
            break
    return found if len(set(found)) == len(found) else []


def _physical(name: str) -> int | None:
    """The GPU of this name, or of the only name that begins so."""
    every = range(settings.gpus())
    if name.isdigit():
        return int(name) if int(name) in every else None
    if name.startswith("MIG-"):
        names = {mig_uuid(gpu, one): gpu for gpu in every for one in range(MIG_DEVICES)}
    elif name.startswith("GPU-"):
        names = {f"GPU-{uuid(gpu)}": gpu for gpu in every}
    else:
        names = {}
    hits = [gpu for full, gpu in names.items() if full.startswith(name)]
    return hits[0] if len(hits) == 1 else None
