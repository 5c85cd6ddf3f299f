"""Problems of a single GPU that NVML knows of: its mode, its division, and who uses its memory.

Source for divided GPUs: NVIDIA's "MIG User Guide".
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.commands.doctor.problem import Problem
from ddp_equivalence.ranks.gpus import Gpu

GIB = 2**30

LEAST_FREE = 4 * GIB
"""Some ranks with a CUDA context of about 0.5 GiB each, and small models."""

MOST_IN_USE = 0.1
"""The part of a GPU's memory that others may use before the doctor mentions it."""


def gpu_problems(gpu: Gpu) -> Iterator[Problem]:
    """What stands in the way of ranks on this GPU."""
    name = f"GPU {gpu.index}"
    if gpu.problem:
        yield Problem(
            f"NVML says of {name}: {gpu.problem}",
            "restart the machine, and see what `dmesg | grep Xid` says; leave the GPU out of "
            "CUDA_VISIBLE_DEVICES until then",
        )
    if gpu.compute_mode == "exclusive_process":
        yield Problem(
            f"{name} is in the compute mode EXCLUSIVE_PROCESS: one process at a time can use it",
            f"ranks cannot share it; `sudo nvidia-smi -i {gpu.index} -c DEFAULT` allows several "
            "processes (under Slurm, ask the administrator)",
        )
    if gpu.compute_mode == "prohibited":
        yield Problem(
            f"{name} is in the compute mode PROHIBITED: no process can use it",
            f"`sudo nvidia-smi -i {gpu.index} -c DEFAULT`",
        )
    if gpu.mig:
        yield from _divided(name, gpu)
    else:
        yield from _memory(name, gpu)


def _divided(name: str, gpu: Gpu) -> Iterator[Problem]:
    count = len(gpu.mig_uuids)
    if not count:
        yield Problem(
            f"{name} is set up to be divided (MIG), but has no instances: CUDA cannot use it",
            f"create instances with `sudo nvidia-smi mig -i {gpu.index} -cgi ... -C`, or undo "
            f"that with `sudo nvidia-smi -i {gpu.index} -mig 0`",
        )
        return
    yield Problem(
        f"{name} is divided into {count} instances (MIG), which have no P2P between each other; a "
        "process can use only the first one",
        "name one instance of each GPU in CUDA_VISIBLE_DEVICES, as `nvidia-smi -L` shows them, or "
        f"undo the division with `sudo nvidia-smi -i {gpu.index} -mig 0`",
    )


def _memory(name: str, gpu: Gpu) -> Iterator[Problem]:
    if gpu.memory_free is None or gpu.memory_total is None:
        return
    in_use = gpu.memory_total - gpu.memory_free
    if gpu.memory_free >= LEAST_FREE and in_use <= MOST_IN_USE * gpu.memory_total:
        return
    holders = [
        f"process {one.pid}" + (f" ({one.memory / GIB:.1f} GiB)" if one.memory else "")
        for one in gpu.processes or ()
    ]
    whose = ", ".join(holders) or "processes that this user or container does not see"
    yield Problem(
        f"{in_use / GIB:.1f} of the {gpu.memory_total / GIB:.1f} GiB of {name} are in use, by "
        f"{whose}",
        "cases may run out of memory there; wait for them, or leave the GPU out of "
        "CUDA_VISIBLE_DEVICES",
    )
