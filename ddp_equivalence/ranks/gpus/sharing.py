"""Whether ranks of NCCL can share the GPUs of this machine.

NCCL refuses two ranks on one GPU only if both say that they are on the same host, so every rank
says that it is on another one (``nccl_defaults`` in ranks/environment.py).
"""

from __future__ import annotations

import os

from ddp_equivalence.ranks.gpus.by_name import any_exclusive, gpus_by_name

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
