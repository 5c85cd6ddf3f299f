"""Describes this machine: GPUs, driver, versions, precision, and variables that are set."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddp_equivalence.measurement.returned import Tf32
from ddp_equivalence.ranks.environment import DEFAULTS
from ddp_equivalence.ranks.gpu_room import SEVERAL
from ddp_equivalence.ranks.gpus import Gpu, Gpus, gpus, visible_gpus
from ddp_equivalence.ranks.lanes import cuda_devices
from ddp_equivalence.ranks.process_state import TF32_OVERRIDE, torchs_precision
from ddp_equivalence.report.record import versions
from ddp_equivalence.report.text import cut, plural, rank_names, ranks_by

# The GPUs are those that NVML knows of. CUDA is not asked, so this process gets no CUDA context.

GIB = 1024**3


@dataclass(frozen=True)
class Box:
    """``gpus``: all GPUs of the machine. ``devices``: how many of them this process may use."""

    gpus: Gpus
    devices: int

    @property
    def has_gpus(self) -> bool:
        return bool(self.gpus.gpus or self.devices)


def this_box() -> Box:
    """The machine that this process runs on."""
    return Box(gpus(), len(cuda_devices()))


def title(box: Box) -> str:
    """The processors of the machine, such as ``4 x NVIDIA A100, 64 CPU cores``."""
    names = Counter(gpu.name or "unknown GPU" for gpu in box.gpus.gpus)
    have = [f"{count} x {name}" for name, count in names.items()]
    if not have:
        have = [f"{box.devices} CUDA {plural(box.devices, 'device')}" if box.devices else "no GPU"]
    cores = len(os.sched_getaffinity(0))
    return f"{', '.join(have)}, {cores} CPU {plural(cores, 'core')}"


LONGEST_VALUE = 63
"""So many characters of a variable's value are shown: some images set lists of drivers."""


def box_lines(box: Box, with_uuids: bool = True) -> Iterator[str]:
    """The machine, line by line. ``with_uuids``: name the GPUs as no other machine's are named."""
    installed = versions()
    # The operating system, without the name that a provider gives to its kernel.
    system = (platform.system(), platform.machine(), *platform.libc_ver())
    yield f"Machine: {title(box)}, {' '.join(filter(None, system))}"
    yield (
        f"  ddp_equivalence {installed['ddp_equivalence']}, torch {installed['torch']}, "
        f"Python {installed['python']}"
    )
    yield f"  {_libraries()}"
    if box.has_gpus and box.gpus.problem:
        yield f"  {box.gpus.problem}"
    if box.gpus.driver:
        runs = box.gpus.cuda_of_driver
        yield f"  driver {box.gpus.driver}{f', which runs CUDA up to {runs}' if runs else ''}"
    for gpu in box.gpus.gpus:
        yield f"  GPU {gpu.index}: {', '.join(_gpu_texts(gpu, with_uuids))}"
    if box.has_gpus:
        yield f"  {_allowed(box)}"
    if box.devices:
        yield f"  {_precision()}"
    variables = [f"{name}={cut(value, LONGEST_VALUE)}" for name, value in set_variables().items()]
    yield f"  Set: {', '.join(variables) or 'no variable of NCCL, CUDA, NVIDIA or torch'}"


def _libraries() -> str:
    import torch

    if torch.version.hip is not None:
        return f"torch is built for ROCm {torch.version.hip}"
    if torch.version.cuda is None:
        return "torch is built for the CPU only"
    nccl, cudnn = versions()["nccl"] or "missing", "missing"
    try:
        if version := torch.backends.cudnn.version():
            # Since cuDNN 9 it is 10000 * major + 100 * minor + patch; before, 1000 * major.
            major, rest = divmod(version, 10000 if version >= 90000 else 1000)
            cudnn = f"{major}.{rest // 100}.{rest % 100}"
    except RuntimeError as error:  # torch found another version than that which it was built for
        cudnn = f"cannot be used ({str(error).splitlines()[0]})"
    return f"torch is built for CUDA {torch.version.cuda}; NCCL: {nccl}; cuDNN: {cudnn}"


def _gpu_texts(gpu: Gpu, with_uuid: bool) -> Iterator[str]:
    yield gpu.name or "name unknown"
    if gpu.problem:
        yield gpu.problem
        return
    if gpu.compute_capability:
        yield "compute capability " + ".".join(map(str, gpu.compute_capability))
    if gpu.memory_total is not None and gpu.memory_free is not None:
        yield f"{gpu.memory_free / GIB:.1f} of {gpu.memory_total / GIB:.1f} GiB free"
    yield f"compute mode {gpu.compute_mode or 'unknown'}"
    yield f"MIG {'unknown' if gpu.mig is None else 'on' if gpu.mig else 'off'}"
    if gpu.processes:
        count = len(gpu.processes)
        yield f"{count} {plural(count, 'process', 'processes')} on it"
    if with_uuid and gpu.uuid:
        yield gpu.uuid


def _allowed(box: Box) -> str:
    """Which of the GPUs the ranks may use."""
    if not box.devices:
        return "The ranks may use none of them: torch finds no CUDA device"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        all_of = "" if box.devices == 1 else "all "
        return f"The ranks may use {all_of}{box.devices} CUDA {plural(box.devices, 'device')}"
    chosen: Sequence[Gpu] = visible_gpus(box.gpus.gpus, visible)
    names = ", ".join(f"GPU {gpu.index}" for gpu in chosen)
    return (
        f"The ranks may use {box.devices} CUDA {plural(box.devices, 'device')}, as "
        f"CUDA_VISIBLE_DEVICES says{f': {names}' if names else ''}"
    )


def _precision() -> str:
    """In which precision the ranks multiply float32 on a GPU."""
    override = os.environ.get(TF32_OVERRIDE, DEFAULTS.get(TF32_OVERRIDE))
    if override == "0":
        who = "your environment sets" if TF32_OVERRIDE in os.environ else "the ranks get"
        return f"float32 is multiplied in full precision: {who} {TF32_OVERRIDE}=0"
    products, convolutions = torchs_precision()
    return (
        f"float32 is multiplied with {TF32_OVERRIDE}={override}; torch's precision is {products} "
        f"for products and {convolutions} for convolutions"
    )


# Texts that say on which physical GPUs ranks ran, and in which precision float32 was there.

SHORT = len("GPU-12345678")
"""So much of a UUID is shown. CUDA_VISIBLE_DEVICES takes it as the name of the GPU, too."""


def gpu_texts(gpus: Mapping[int, str]) -> list[str]:
    """``rank 0 on GPU-12345678`` for every GPU; [] unless every rank has one.

    ``gpus``: rank -> the UUIDs of its GPUs, as in ``Evidence.gpu``.
    """
    if not all(gpus.values()):
        return []
    short = {
        rank: " and ".join(one[:SHORT] for one in gpu.split(SEVERAL)) for rank, gpu in gpus.items()
    }
    ranks = ranks_by(sorted(short.items()))
    return [f"{rank_names(of_gpu)} on {gpu}" for gpu, of_gpu in ranks.items()]


def tf32_texts(settings: Collection[Tf32 | None]) -> list[str]:
    """One text that says where TF32 was allowed in float32; [] for ranks on the CPU."""
    known = [one for one in settings if one is not None]
    if not known:
        return []
    states = {True: "on", False: "off"}
    products, convolutions = (
        states[allowed.pop()] if len(allowed) == 1 else "on for some ranks and off for others"
        for allowed in ({one.products for one in known}, {one.convolutions for one in known})
    )
    and_for = "" if products == convolutions else f"{convolutions} for "
    return [f"TF32 {products} for products and {and_for}convolutions of float32"]


# The variables of NCCL, CUDA and torch that are set, without values that are private.

PREFIXES = ("NCCL_", "CUDA_", "NVIDIA_", "TORCH_", "HIP_", "HSA_", "ROCR_", "RCCL_")

NAMES_OF_HIDDEN = re.compile(r"TOKEN|SECRET|KEY|PASSWORD|USER|HOST|ADDR|COMM_ID|FILE|PATH")
"""The values of such variables name a machine, a person or a folder, or open a door."""

HIDDEN_VALUES = re.compile(r"[/\\@~]|\b\d+\.\d+\.\d+\.\d+\b|[A-Za-z][\w-]*\.[A-Za-z]")
"""Paths, addresses of machines, and names of machines."""

HIDDEN = "(set, not shown)"


def set_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name -> value of the variables that are set; ``HIDDEN`` stands for a value that is private.

    ``environment``: None stands for that of this process.
    """
    variables = os.environ if environment is None else environment
    return {
        name: HIDDEN if NAMES_OF_HIDDEN.search(name) or HIDDEN_VALUES.search(value) else value
        for name, value in sorted(variables.items())
        if name.startswith(PREFIXES)
    }
