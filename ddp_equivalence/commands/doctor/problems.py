"""Problems of a machine in words, with what its owner can do.

Sources: "Minor Version Compatibility" in NVIDIA's "CUDA Compatibility" (drivers); "Runtime and MPI
issues" (/dev/shm) and "GPU troubleshooting" (ACS) in the NCCL User Guide; NVIDIA's "MIG User
Guide".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_equivalence.commands.doctor.examination import Machine, Outcome, State
from ddp_equivalence.ranks.gpus import Gpu, NvmlState, visible_gpus
from ddp_equivalence.report.machine import GIB
from ddp_equivalence.report.text import plural

LEAST_SHARED_MEMORY = GIB
"""The shared memory that the NCCL User Guide gives to a container. Docker's default is 64 MB."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest driver for programs that were built with it."""

LOOK_FOR_XID = (
    "see what `sudo dmesg | grep Xid` says, and then restart the machine; leave the GPU out of "
    "CUDA_VISIBLE_DEVICES until then"
)
MORE_SHARED_MEMORY = (
    "start the container with --ipc=host, or with --shm-size=1g --ulimit memlock=-1"
)

SELECTOR = "https://pytorch.org/get-started/locally"

LEAST_FREE = 4 * GIB
"""Some ranks with a CUDA context of about 0.5 GiB each, and small models."""

MOST_IN_USE = 0.1
"""The part of a GPU's memory that others may use before the doctor mentions it."""


@dataclass(frozen=True)
class Problem:
    """``what`` is wrong, or may surprise; ``advice``: what the owner can do."""

    what: str
    advice: str


def problems(machine: Machine, states: Sequence[State] = ()) -> Iterator[Problem]:
    """All problems that the machine's facts and the states of its parts show."""
    yield from _torch_and_devices(machine)
    yield from _nvml(machine)
    yield from _driver(machine)
    yield from _of_gpus(visible_gpus(machine.gpus.gpus, machine.visible))
    size = machine.shared_memory
    if len(machine.devices) > 1 and size is not None and size < LEAST_SHARED_MEMORY:
        yield Problem(
            f"/dev/shm has {size / 2**20:.0f} MiB: NCCL needs more where GPUs do not reach each "
            "other's memory, and fails to start without",
            MORE_SHARED_MEMORY,
        )
    yield from _of_states(machine, states)
    parts: dict[str, list[str]] = {}
    for state in states:
        for texts, remedy in REMEDIES:
            if any(text in state.error for text in texts):
                parts.setdefault(remedy, []).append(state.name)
                break
    for advice, names in parts.items():
        yield Problem(f"an error of {', '.join(names)} has a known remedy", advice)


def _torch_and_devices(machine: Machine) -> Iterator[Problem]:
    if machine.torch_cuda is None and machine.torch_hip is None:
        if machine.gpus.gpus or machine.device_files:
            yield Problem(
                f"this machine has GPUs, but torch {machine.torch_version} is built for the CPU",
                f"install a build of torch for your GPUs: {SELECTOR}",
            )
    elif machine.torch_hip is not None and "kfd" not in machine.device_files:
        yield Problem(
            f"torch is built for ROCm {machine.torch_hip}, but there is no AMD GPU: /dev/kfd is "
            "missing",
            "in a container, pass --device=/dev/kfd --device=/dev/dri; on a machine with NVIDIA's "
            f"GPUs, install a build of torch for CUDA: {SELECTOR}",
        )
    elif machine.visible is not None:
        entries = [entry for entry in machine.visible.split(",") if entry.strip()]
        count = len(machine.devices)
        if len(entries) > count:
            yield Problem(
                f"{machine.variable}={machine.visible} has {len(entries)} entries, but leaves "
                f"{count} {plural(count, 'GPU')}: an entry that names no GPU ends the list, and a "
                "GPU that is named twice empties it",
                "compare it with the GPUs that `nvidia-smi -L` or `rocm-smi` lists",
            )
        elif not entries:
            yield Problem(
                f"{machine.variable} is set and empty, so that no GPU can be used",
                f"`unset {machine.variable}`",
            )


NVML_ADVICE = {
    NvmlState.NO_PACKAGE: "driver, memory, compute mode, MIG and P2P were not looked at: install "
    "it, and run doctor again",
    NvmlState.VERSION_MISMATCH: "the driver was updated while it was running: restart the machine; "
    "in a container, restart the container after the host",
    NvmlState.NO_LIBRARY: "on a machine with GPUs, install NVIDIA's driver; in a container, start "
    "it with --gpus all and NVIDIA's container toolkit; without a GPU all cases run on the CPU",
    NvmlState.NO_DRIVER: "load it with `sudo modprobe nvidia`, or restart the machine",
    NvmlState.NO_PERMISSION: "ask the administrator for access, often by a group such as video",
}
"""Why NVML did not answer -> what to do."""


def _nvml(machine: Machine) -> Iterator[Problem]:
    """Only where a GPU is expected: on a machine without one it is no problem."""
    state, problem = machine.gpus.nvml, machine.gpus.problem
    has_gpu = bool(machine.devices or machine.device_files)
    if state in (NvmlState.ANSWERED, NvmlState.ROCM) or machine.torch_cuda is None:
        return
    if state is NvmlState.NO_PACKAGE and not has_gpu:
        return
    if state is NvmlState.NO_LIBRARY:
        problem = f"torch {machine.torch_version} is built for CUDA, but {problem}"
    otherwise = "see whether `nvidia-smi` works, and what `dmesg | grep NVRM` says"
    yield Problem(problem, NVML_ADVICE.get(state, otherwise))


def _driver(machine: Machine) -> Iterator[Problem]:
    """A driver runs programs that were built for its own CUDA version, or for an older one.

    It also runs newer ones of its own major version, except for what the driver has to compile.
    """
    runs, needs = _version(machine.gpus.cuda_of_driver), _version(machine.torch_cuda)
    if runs is None or needs is None or needs <= runs:
        return
    driver = f"driver {machine.gpus.driver} runs CUDA up to {machine.gpus.cuda_of_driver}"
    torch = f"torch {machine.torch_version} is built for CUDA {machine.torch_cuda}"
    if needs[0] > runs[0]:
        oldest = OLDEST_DRIVER.get(needs[0])
        newer = f"driver {oldest} or newer" if oldest else "a newer driver"
        yield Problem(
            f"the driver is too old: {driver}, and {torch}",
            f"install {newer}, or a build of torch for CUDA {runs[0]}: {SELECTOR}; NVIDIA's "
            "package cuda-compat helps on data-centre GPUs",
        )
    else:
        yield Problem(
            f"{driver}, and {torch}: this works, except for kernels that the driver compiles",
            "update the driver if you see errors about PTX",
        )


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def _of_gpus(gpus: Sequence[Gpu]) -> Iterator[Problem]:
    """The problems of ranks on these GPUs. GPUs with the same problem are named once."""
    for gpu in gpus:
        if gpu.problem:
            yield Problem(f"NVML says of GPU {gpu.index}: {gpu.problem}", LOOK_FOR_XID)
    for name, (what, advice) in MODES.items():
        if of_mode := [gpu for gpu in gpus if name in (gpu.compute_mode, _division(gpu))]:
            numbers = [str(gpu.index) for gpu in of_mode]
            names = f"{plural(len(of_mode), 'GPU')} {', '.join(numbers)}"
            advice = advice.replace("-i N", f"-i {','.join(numbers)}")
            yield Problem(f"{names}: {what}", advice)
    for gpu in gpus:
        if not gpu.mig:
            yield from _memory(gpu)


def _division(gpu: Gpu) -> str:
    return ("divided" if gpu.mig_uuids else "to_be_divided") if gpu.mig else ""


MODES = {
    "exclusive_process": (
        "the compute mode is EXCLUSIVE_PROCESS, so one process at a time can use a GPU",
        "the suite works all the same, but starts ranks more often, and ranks cannot share a GPU; "
        "`sudo nvidia-smi -i N -c DEFAULT` allows several processes (under Slurm, ask the "
        "administrator)",
    ),
    "prohibited": (
        "the compute mode is PROHIBITED, so no process can use a GPU",
        "`sudo nvidia-smi -i N -c DEFAULT`",
    ),
    "divided": (
        "divided into instances (MIG), of which a process can use only the first one, and which "
        "have no P2P",
        "switch MIG off with `sudo nvidia-smi -i N -mig 0`, or name one instance in "
        "CUDA_VISIBLE_DEVICES, as `nvidia-smi -L` shows it: the suite then has one GPU",
    ),
    "to_be_divided": (
        "set up to be divided (MIG), but without instances, so CUDA cannot use them",
        "switch MIG off with `sudo nvidia-smi -i N -mig 0`, or create instances with "
        "`sudo nvidia-smi mig -i N -cgi PROFILE -C` (`nvidia-smi mig -lgip` lists the profiles)",
    ),
}
"""A mode of a GPU that stands in the way -> what it is, and what to do."""


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


def _of_states(machine: Machine, states: Sequence[State]) -> Iterator[Problem]:
    """Problems that the answers of GPUs and of their pairs show."""
    gpus = [one for one in states if one.device]
    working = [gpu.device for gpu in gpus if gpu.outcome is Outcome.WORKS]
    failed = [gpu.name for gpu in gpus if gpu.outcome is not Outcome.WORKS]
    if failed and working:
        yield Problem(
            f"{', '.join(failed)}: not even one product was right there, so every case on such a "
            "GPU will fail",
            f"see the reason on the GPU's line above; `export {machine.variable}="
            f"{','.join(working)}` leaves it out",
        )
    if cured := [pair.name for pair in states if pair.without_p2p is Outcome.WORKS]:
        yield Problem(
            f"the pairs of GPUs {', '.join(cured)} give a right sum only with NCCL_P2P_DISABLE=1: "
            "they do not reach each other's memory, although the driver says so",
            "most often the IOMMU or ACS of the PCI Express bridges is in the way: switch them off "
            "in the BIOS or with setpci, or on the kernel's command line (iommu=pt). Until then "
            "export NCCL_P2P_DISABLE=1, which does not change how nn.DataParallel copies: the line "
            "data_parallel says whether its copies arrive",
        )


# Errors that CUDA and NCCL raise on ranks, and what the owner of the machine can do about them.
#
# Only the errors' own texts tell them apart. They are those of CUDA's runtime
# (cudaGetErrorString) and of the log lines that NCCL prints.

REMEDIES = (
    (
        ("driver version is insufficient", "NVIDIA driver on your system is too old"),
        "the driver is too old for this build of torch: update it, or install a build of torch for "
        "an older CUDA version",
    ),
    (
        ("unsupported display driver / cuda driver combination",),
        "the driver's parts have different versions: restart the machine, or in a container the "
        "container; do not mix NVIDIA's package cuda-compat with a newer driver",
    ),
    (
        ("CUDA in forked subprocess",),
        "a module that every Python process here imports has started CUDA: set "
        "DDP_EQUIVALENCE_START_METHOD=spawn",
    ),
    (
        ("no kernel image is available",),
        f"this build of torch has no kernels for the GPU: install another one: {SELECTOR}",
    ),
    (
        ("busy or unavailable",),
        "the GPU takes one process at a time (compute mode EXCLUSIVE_PROCESS), and another one has "
        "it, or it takes none (PROHIBITED): see nvidia-smi -q -d COMPUTE, and change the mode or "
        "end the other process",
    ),
    (
        ("out of memory",),
        "other processes hold the GPU's memory: see nvidia-smi, and wait for them or end them",
    ),
    (
        ("system not yet initialized",),
        "GPUs that are connected by NVSwitch need NVIDIA's Fabric Manager in the driver's version: "
        "see `systemctl status nvidia-fabricmanager`",
    ),
    (
        ("/dev/shm", "shared memory segment"),
        f"NCCL found too little shared memory: {MORE_SHARED_MEMORY}",
    ),
    (
        ("uncorrectable ECC error", "has fallen off the bus", "GPU is lost"),
        f"the GPU's hardware has failed: {LOOK_FOR_XID}",
    ),
    (
        ("CUDA error: unknown error", "CUDA unknown error", "forward compatibility was attempted"),
        "the driver is not set up completely: restart the machine or the container, and see "
        "whether nvidia-smi works",
    ),
    (
        ("Duplicate GPU detected",),
        "two ranks of NCCL got the same GPU: look for a GPU that CUDA_VISIBLE_DEVICES names twice, "
        "or for two instances of one divided GPU (MIG)",
    ),
)
"""Each: parts of the text of an error, and the remedy."""
