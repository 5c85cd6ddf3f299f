"""Problems of a single GPU that NVML knows of: its mode, its division, and who uses its memory.

Source for divided GPUs: NVIDIA's "MIG User Guide".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_equivalence.commands.doctor.problem import Problem
from ddp_equivalence.ranks.gpus import Gpu
from ddp_equivalence.report.box import GIB
from ddp_equivalence.report.wrapping import plural

LEAST_FREE = 4 * GIB
"""Some ranks with a CUDA context of about 0.5 GiB each, and small models."""

MOST_IN_USE = 0.1
"""The part of a GPU's memory that others may use before the doctor mentions it."""


def gpu_problems(gpus: Sequence[Gpu]) -> Iterator[Problem]:
    """What stands in the way of ranks on these GPUs. GPUs with the same problem are named once."""
    for gpu in gpus:
        if gpu.problem:
            yield _lost(gpu)
    if exclusive := [gpu for gpu in gpus if gpu.compute_mode == "exclusive_process"]:
        yield Problem(
            f"{_names(exclusive)}: the compute mode is EXCLUSIVE_PROCESS, so one process at a time "
            "can use a GPU",
            "the suite works all the same, but starts ranks more often, and ranks cannot share a "
            f"GPU; {_command(exclusive, '-c DEFAULT')} allows several processes (under Slurm, ask "
            "the administrator)",
        )
    if prohibited := [gpu for gpu in gpus if gpu.compute_mode == "prohibited"]:
        yield Problem(
            f"{_names(prohibited)}: the compute mode is PROHIBITED, so no process can use a GPU",
            _command(prohibited, "-c DEFAULT"),
        )
    if divided := [gpu for gpu in gpus if gpu.mig and gpu.mig_uuids]:
        yield Problem(
            f"{_names(divided)}: divided into instances (MIG), of which a process can use only the "
            "first one, and which have no P2P",
            f"switch MIG off with {_command(divided, '-mig 0')}, or name one instance in "
            "CUDA_VISIBLE_DEVICES, as `nvidia-smi -L` shows it: the suite then has one GPU",
        )
    if empty := [gpu for gpu in gpus if gpu.mig and not gpu.mig_uuids]:
        yield Problem(
            f"{_names(empty)}: set up to be divided (MIG), but without instances, so CUDA cannot "
            "use them",
            f"switch MIG off with {_command(empty, '-mig 0')}, or create instances with "
            f"{_command(empty, '-cgi PROFILE -C', 'mig ')} (`nvidia-smi mig -lgip` lists the "
            "profiles)",
        )
    for gpu in gpus:
        if not gpu.mig:
            yield from _memory(gpu)


def _lost(gpu: Gpu) -> Problem:
    return Problem(
        f"NVML says of GPU {gpu.index}: {gpu.problem}",
        "see what `sudo dmesg | grep Xid` says, and then restart the machine; leave the GPU out of "
        "CUDA_VISIBLE_DEVICES until then",
    )


def _memory(gpu: Gpu) -> Iterator[Problem]:
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
        f"{in_use / GIB:.1f} of the {gpu.memory_total / GIB:.1f} GiB of GPU {gpu.index} are in use,"
        f" by {whose}",
        "cases may run out of memory there: wait until the other processes end, or leave the GPU "
        "out of CUDA_VISIBLE_DEVICES",
    )


def _names(gpus: Sequence[Gpu]) -> str:
    """``GPU 0`` or ``GPUs 0, 2``, as ``nvidia-smi`` numbers them."""
    numbers = ", ".join(str(gpu.index) for gpu in gpus)
    return f"{plural(len(gpus), 'GPU')} {numbers}"


def _command(gpus: Sequence[Gpu], change: str, what: str = "") -> str:
    """The command that changes a setting of these GPUs."""
    numbers = ",".join(str(gpu.index) for gpu in gpus)
    return f"`sudo nvidia-smi {what}-i {numbers} {change}`"
