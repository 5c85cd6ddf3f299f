"""Asks every part of the machine its question, and says each answer as soon as it is there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.commands.doctor import on_rank
from ddp_equivalence.commands.doctor.machine import (
    GpuState,
    Machine,
    Outcome,
    PairState,
    State,
    all_together,
    gpu_states,
    pair_states,
)
from ddp_equivalence.commands.doctor.on_rank import ask_ranks
from ddp_equivalence.ranks import probe
from ddp_equivalence.ranks.backend_names import LANES, NCCL_BACKENDS, NCCL_SHARED
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
from ddp_equivalence.ranks.gpus import Gpu, NvmlState, visible_gpus
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, missing, shared_lane
from ddp_equivalence.ranks.nccl import nodes_counted
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from ddp_equivalence.report.machine import GIB
from ddp_equivalence.report.text import plural

NAME_WIDTH = 22
OUTCOME_WIDTH = 9


class Examination:
    """``gpus``, ``pairs`` and ``others`` are the states found so far; ``lines`` finds them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.gpus: list[GpuState] = []
        self.pairs: list[PairState] = []
        self.others: list[State] = []

    @property
    def states(self) -> list[State]:
        """All states, in the order in which they were found."""
        of_gpus = [gpu.state for gpu in self.gpus]
        return [*of_gpus, *(pair.state for pair in self.pairs), *self.others]

    def problems(self) -> list[Problem]:
        """The problems that the machine's facts and the states show."""
        return list(problems(self.machine, self.gpus, self.pairs, self.others))

    def lines(self) -> Iterator[str]:
        """Ask the GPUs, their pairs, and the lanes. Yields a line for each, under headings."""
        if self.machine.devices:
            yield from self._not_described()
            yield "Each GPU alone: start CUDA, and multiply two matrices"
            for gpu in gpu_states(self.machine.devices):
                self.gpus.append(gpu)
                yield _line(gpu.state)
            yield ""
        if len(self.machine.devices) > 1:
            yield "Pairs of GPUs, and all together: sum 16 MiB by NCCL (GB/s: busbw of nccl-tests)"
            yield from self._together()
            yield ""
        yield (
            "Lanes: collectives with known answers; NCCL has a rank on each GPU, nccl_shared and "
            "gloo have 2 ranks"
        )
        for lane in lane_states(self.machine):
            self.others.append(lane)
            yield _line(lane)

    def _not_described(self) -> Iterator[str]:
        """What nobody could say of the GPUs, and why."""
        if self.machine.gpus.problem:
            what = "driver, free memory, compute mode, MIG and P2P of the GPUs"
            self.others.append(
                State("NVML", Outcome.NOT_RUN, f"{what}: {self.machine.gpus.problem}")
            )
            yield _line(self.others[-1])
            yield ""

    def _together(self) -> Iterator[str]:
        working = [gpu for gpu in self.gpus if gpu.state.outcome is Outcome.WORKS]
        reason = missing("nccl", 2)
        if reason is None and len(working) < 2:
            verb = "works" if len(working) == 1 else "work"
            reason = f"of {len(self.gpus)} GPUs, {len(working)} {verb} alone"
        if reason is not None:
            self.others.append(State("pairs", Outcome.NOT_RUN, reason))
            yield _line(self.others[-1])
            return
        for pair in pair_states(self.gpus, self.machine.gpus):
            self.pairs.append(pair)
            yield _line(pair.state)
        if len(working) > 2:  # the sum over two GPUs is that of their pair
            self.others.append(all_together(self.gpus))
            yield _line(self.others[-1])
        self.others.append(node_state())
        yield _line(self.others[-1])


def _line(state: State) -> str:
    return f"  {state.name:<{NAME_WIDTH}}{state.outcome:<{OUTCOME_WIDTH}}{state.text}"


# The state of every lane on this machine: it works, it gives wrong answers, or it cannot run.

DEADLINE = 30.0
"""The seconds for all answers of one lane. One collective gets half of them."""

LANES_TRIED = tuple(lane for lane in LANES if lane not in ("gloo", "emulated"))


def lane_states(machine: Machine) -> Iterator[State]:
    """Look at every lane. Where it can run, ask its collectives questions with known answers."""
    for name in LANES_TRIED:
        ranks = _ranks(name)
        # gloo lets ranks share a GPU, so one is enough for it.
        reason = missing(name, 1 if name == "gloo_cuda" else ranks)
        if reason is None and name == "gloo_cuda":
            reason = _why_ranks_cannot_share(machine)
        if reason is not None:
            yield State(name, Outcome.NOT_RUN, reason, error=reason)
        elif name.startswith("data_parallel"):
            yield _data_parallel(name)
        else:
            yield _probe(name, ranks)


def _why_ranks_cannot_share(machine: Machine) -> str | None:
    """The reason why 2 ranks cannot run on these GPUs. None if they can."""
    modes = [gpu.compute_mode for gpu in visible_gpus(machine.gpus.gpus, machine.visible)]
    if len(machine.devices) == 1 and modes == ["exclusive_process"]:
        return "the only GPU is in the compute mode EXCLUSIVE_PROCESS, so ranks cannot share it"
    return None


def _ranks(name: str) -> int:
    """NCCL gets a rank on every GPU; a single one is enough to ask whether it starts.

    On the other lanes there are 2, or 2 replicas, so that shared lanes are asked with one GPU.
    """
    return len(cuda_devices()) or 2 if name in NCCL_BACKENDS else 2


def _probe(name: str, count: int) -> State:
    device = "cpu" if name == "gloo_fallback" else "cuda"
    backend = "gloo" if name.startswith("gloo") else name
    layout = parse(f"1x{count}")
    lane = shared_lane(layout) if name == NCCL_SHARED else Lane(name, backend, device)
    began = time.monotonic()
    try:
        # Fresh ranks are stopped afterwards. Warm ones would be in the way of the next lane's
        # on a GPU that takes one process at a time.
        with warm_ranks().acquire(layout, lane, DEADLINE / 2, fresh=True) as ranks:
            seconds_to_start = time.monotonic() - began
            results = probe.probe_ranks(ranks, DEADLINE)
    except RankFailed as error:
        timed_out = isinstance(error, RanksTimedOut)
        return State(name, Outcome.FAILED, str(error).splitlines()[0], str(error), timed_out)
    wrong = [f"{result.collective} ({result.detail})" for result in results if result.wrong]
    if wrong:
        return State(name, Outcome.WRONG, f"wrong answers: {', '.join(wrong)}")
    right = sum(result.correct for result in results)
    ranks_text = "1 rank" if count == 1 else f"{count} ranks"
    text = f"{right} answers right, {ranks_text} started in {seconds_to_start:.1f} s"
    refused = probe.summarise_refusals(results)
    return State(name, Outcome.WORKS, f"{text}; refuses {refused}" if refused else text)


def _data_parallel(name: str) -> State:
    """One step in one process, over all GPUs, or with 2 replicas on the only one."""
    lane, devices = Lane(name, "gloo", "cuda"), cuda_devices()
    replicas = max(2, len(devices))
    answers = ask_ranks(lane, devices, on_rank.data_parallel_step, replicas, seconds=DEADLINE)
    if not answers.by_rank:
        text = answers.error.splitlines()[0]
        return State(name, Outcome.FAILED, text, answers.error, answers.timed_out)
    (wrong,) = answers.by_rank
    if wrong:
        return State(name, Outcome.WRONG, wrong)
    where = f"over {len(devices)} GPUs"
    if len(devices) == 1:
        where = f"with {replicas} replicas on one GPU"
    return State(name, Outcome.WORKS, f"the gradient of one step {where} is that of the big batch")


# Does NCCL take simulated nodes for hosts, as checks on layouts such as 2x2 rely on?

NAME = "nodes"


def node_state() -> State:
    """Let NCCL count the nodes of two ranks on two simulated nodes."""
    if "NCCL_HOSTID" in os.environ:
        return State(NAME, Outcome.NOT_RUN, "NCCL_HOSTID is set, so that NCCL sees one host")
    layout = parse("2x1")
    try:
        counted = nodes_counted(layout)
    except RankFailed as error:
        timed_out = isinstance(error, RanksTimedOut)
        return State(NAME, Outcome.FAILED, str(error).splitlines()[0], str(error), timed_out)
    if counted is None:
        return State(NAME, Outcome.NOT_RUN, "NCCL's log does not say how many nodes it counts")
    text = f"NCCL counts {counted} of {layout.nodes} simulated nodes"
    return State(NAME, Outcome.WORKS if counted == layout.nodes else Outcome.WRONG, text)


# Problems of a machine in words, with what its owner can do.
#
# Sources: "Minor Version Compatibility" in NVIDIA's "CUDA Compatibility" (drivers); "Runtime and
# MPI issues" (/dev/shm) and "GPU troubleshooting" (ACS) in the NCCL User Guide.

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


# Problems of a single GPU that NVML knows of: its mode, its division, and who uses its memory.
#
# Source for divided GPUs: NVIDIA's "MIG User Guide".

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


# A problem of a machine, in words.


@dataclass(frozen=True)
class Problem:
    """``what`` is wrong, or may surprise; ``advice``: what the owner can do."""

    what: str
    advice: str


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
        "this build of torch has no kernels for the GPU: install another build of torch",
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
        "NCCL found too little shared memory: start the container with --ipc=host, or with "
        "--shm-size=1g --ulimit memlock=-1",
    ),
    (
        ("uncorrectable ECC error", "has fallen off the bus", "GPU is lost"),
        "the GPU's hardware has failed: see what `sudo dmesg | grep Xid` says, and then restart "
        "the machine; leave the GPU out of CUDA_VISIBLE_DEVICES until then",
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


def what_to_do(error: str) -> str:
    """The remedy for an error that is known; "" for any other."""
    for texts, remedy in REMEDIES:
        if any(text in error for text in texts):
            return remedy
    return ""


# Whether a build of torch has kernels for a GPU, by the rules of NVIDIA's compiler manual.
#
# An entry ``sm_XY`` is machine code for compute capability X.Y and later ones of the same X. One
# that ends in ``a`` is for X.Y alone, and one that ends in ``f`` for X.Y and later ones, as
# without it. ``compute_XY`` is code that the driver compiles for any GPU from X.Y on, except with
# an ``a``.

ENTRY = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """True if one of the entries fits. True as well where none are known."""
    return not architectures or any(_fits(capability, entry) for entry in architectures)


def _fits(capability: tuple[int, int], entry: str) -> bool:
    match = ENTRY.fullmatch(entry)
    if match is None:
        return True  # a kind of entry that this module does not know speaks against nothing
    kind, major, minor, ending = match.groups()
    code = int(major), int(minor)
    if ending == "a":
        return capability == code
    if kind == "compute" and not ending:
        return capability >= code
    return capability[0] == code[0] and capability >= code
