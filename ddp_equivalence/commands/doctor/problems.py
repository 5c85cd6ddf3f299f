"""Problems of a machine in words, with what its owner can do.

Sources: "Minor Version Compatibility" in NVIDIA's "CUDA Compatibility" (drivers); "Runtime and MPI
issues" (/dev/shm) and "GPU troubleshooting" (ACS) in the NCCL User Guide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_equivalence.commands.doctor.architectures import has_kernels
from ddp_equivalence.commands.doctor.gpu_problems import gpu_problems
from ddp_equivalence.commands.doctor.gpu_states import GpuState, PairState
from ddp_equivalence.commands.doctor.known_errors import what_to_do
from ddp_equivalence.commands.doctor.machine import Machine
from ddp_equivalence.commands.doctor.problem import Problem
from ddp_equivalence.commands.doctor.state import Outcome, State
from ddp_equivalence.ranks.gpus import NvmlState, visible_gpus
from ddp_equivalence.report.box import GIB
from ddp_equivalence.report.wrapping import plural

LEAST_SHARED_MEMORY = GIB
"""What the NCCL User Guide gives to a container. Docker's default is 64 MB."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest driver for programs that were built with it."""

SELECTOR = "https://pytorch.org/get-started/locally"


def problems(
    machine: Machine,
    gpus: Sequence[GpuState] = (),
    pairs: Sequence[PairState] = (),
    others: Sequence[State] = (),
) -> Iterator[Problem]:
    """All problems that the machine's facts and the states of its parts show."""
    yield from _torch_and_devices(machine)
    yield from _nvml(machine)
    yield from _driver(machine)
    yield from gpu_problems(visible_gpus(machine.gpus.gpus, machine.visible))
    yield from _shared_memory(machine)
    yield from _kernels(machine, gpus)
    yield from _failed_alone(machine, gpus)
    yield from _pairs(pairs)
    yield from _errors([*(gpu.state for gpu in gpus), *(pair.state for pair in pairs), *others])


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
        yield from _visible(machine, machine.visible)


def _visible(machine: Machine, visible: str) -> Iterator[Problem]:
    entries = [entry for entry in visible.split(",") if entry.strip()]
    count = len(machine.devices)
    if len(entries) > count:
        yield Problem(
            f"{machine.variable}={visible} has {len(entries)} entries, but leaves {count} "
            f"{plural(count, 'GPU')}: an entry that names no GPU ends the list, and a GPU that is "
            "named twice empties it",
            "compare it with the GPUs that `nvidia-smi -L` or `rocm-smi` lists",
        )
    elif not entries:
        yield Problem(
            f"{machine.variable} is set and empty, so that no GPU can be used",
            f"`unset {machine.variable}`",
        )


def _nvml(machine: Machine) -> Iterator[Problem]:
    """Only where a GPU is expected: on a machine without one it is no problem."""
    state, problem = machine.gpus.nvml, machine.gpus.problem
    has_gpu = bool(machine.devices or machine.device_files)
    if state in (NvmlState.ANSWERED, NvmlState.ROCM) or machine.torch_cuda is None:
        return
    if state is NvmlState.NO_PACKAGE:
        if has_gpu:
            yield Problem(
                problem,
                "driver, memory, compute mode, MIG and P2P were not looked at: install it, and run "
                "doctor again",
            )
    elif state is NvmlState.VERSION_MISMATCH:
        yield Problem(
            problem,
            "the driver was updated while it was running: restart the machine; in a container, "
            "restart the container after the host",
        )
    elif state is NvmlState.NO_LIBRARY:
        yield Problem(
            f"torch {machine.torch_version} is built for CUDA, but {problem}",
            "on a machine with GPUs, install NVIDIA's driver; in a container, start it with "
            "--gpus all and NVIDIA's container toolkit; without a GPU all cases run on the CPU",
        )
    elif state is NvmlState.NO_DRIVER:
        yield Problem(problem, "load it with `sudo modprobe nvidia`, or restart the machine")
    elif state is NvmlState.NO_PERMISSION:
        yield Problem(problem, "ask the administrator for access, often by a group such as video")
    else:
        yield Problem(problem, "see whether `nvidia-smi` works, and what `dmesg | grep NVRM` says")


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


def _shared_memory(machine: Machine) -> Iterator[Problem]:
    size = machine.shared_memory
    if len(machine.devices) > 1 and size is not None and size < LEAST_SHARED_MEMORY:
        yield Problem(
            f"/dev/shm has {size / 2**20:.0f} MiB: NCCL needs more where GPUs do not reach each "
            "other's memory, and fails to start without",
            "start the container with --ipc=host, or with --shm-size=1g --ulimit memlock=-1",
        )


def _kernels(machine: Machine, gpus: Sequence[GpuState]) -> Iterator[Problem]:
    if machine.torch_cuda is None:
        return
    for gpu in gpus:
        answer = gpu.answer
        if answer is not None and not has_kernels(answer.capability, answer.architectures):
            major, minor = answer.capability
            yield Problem(
                f"{gpu.state.name}, {answer.name}, has compute capability {major}.{minor}, and "
                f"torch {machine.torch_version} has kernels for "
                f"{', '.join(answer.architectures)} only",
                f"install a build of torch with kernels for this GPU: {SELECTOR}",
            )


def _failed_alone(machine: Machine, gpus: Sequence[GpuState]) -> Iterator[Problem]:
    working = [gpu.device for gpu in gpus if gpu.state.outcome is Outcome.WORKS]
    failed = [gpu.state.name for gpu in gpus if gpu.state.outcome is not Outcome.WORKS]
    if failed and working:
        yield Problem(
            f"{', '.join(failed)}: not even one product was right there, so every case on such a "
            "GPU will fail",
            f"see the reason on the GPU's line above; `export {machine.variable}="
            f"{','.join(working)}` leaves it out",
        )


def _pairs(pairs: Sequence[PairState]) -> Iterator[Problem]:
    cured = [pair.state.name for pair in pairs if pair.without_p2p is Outcome.WORKS]
    if cured:
        yield Problem(
            f"the pairs of GPUs {', '.join(cured)} give a right sum only with NCCL_P2P_DISABLE=1: "
            "they do not reach each other's memory, although the driver says so",
            "most often the IOMMU or ACS of the PCI Express bridges is in the way: switch them off "
            "in the BIOS or with setpci, or on the kernel's command line (iommu=pt). Until then "
            "export NCCL_P2P_DISABLE=1, which does not change how nn.DataParallel copies: the line "
            "data_parallel says whether its copies arrive",
        )


def _errors(states: Sequence[State]) -> Iterator[Problem]:
    """Errors of CUDA and NCCL that have a known remedy; the same one is given once."""
    parts: dict[str, list[str]] = {}
    for state in states:
        if advice := what_to_do(state.error):
            parts.setdefault(advice, []).append(state.name)
    for advice, names in parts.items():
        yield Problem(f"an error of {', '.join(names)} has a known remedy", advice)


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
