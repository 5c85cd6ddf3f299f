"""The facts about this machine, and a question with a known answer for every part of it.

Each answer is said as soon as it is there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from math import inf
from pathlib import Path

import torch

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.commands.doctor import on_rank
from ddp_equivalence.commands.doctor.on_rank import NCCL, ONE_GPU, GpuAnswer, ask_ranks
from ddp_equivalence.ranks import probe
from ddp_equivalence.ranks.backend_names import LANES, NCCL_BACKENDS, NCCL_SHARED
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpus import Gpus, Link, gpus, plain_uuid, visible_gpus
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, missing, shared_lane
from ddp_equivalence.ranks.nccl import nodes_counted
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from ddp_equivalence.report.text import plural


@dataclass(frozen=True)
class Machine:
    """``gpus``: what NVML says. ``torch_cuda`` and ``torch_hip``: what this torch is built for.

    ``devices``: the CUDA devices that ranks may use. ``variable``: the environment variable that
    can name them. ``visible``: its value, None if it is not set. ``shared_memory``: the size of
    /dev/shm in bytes, None if there is none. ``device_files``: those of GPUs in /dev, such as
    "nvidia0"; AMD's is "kfd".
    """

    gpus: Gpus
    torch_version: str
    torch_cuda: str | None
    torch_hip: str | None
    devices: Sequence[str]
    variable: str
    visible: str | None
    shared_memory: int | None
    device_files: Sequence[str]


def this_machine() -> Machine:
    """The machine that this process runs on."""
    variable = "CUDA_VISIBLE_DEVICES" if torch.version.hip is None else "HIP_VISIBLE_DEVICES"
    shared_memory = None
    with suppress(OSError):
        shared_memory = shutil.disk_usage("/dev/shm").total
    files = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]
    return Machine(
        gpus=gpus(),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        devices=cuda_devices(),
        variable=variable,
        visible=os.environ.get(variable),
        shared_memory=shared_memory,
        device_files=sorted(file.name for file in files),
    )


# What the doctor found out about one part of the machine.


class Outcome(StrEnum):
    """The word that is printed for it."""

    WORKS = "works"
    WRONG = "WRONG"
    FAILED = "FAILED"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True)
class State:
    """One line of the doctor's table.

    ``outcome``: WORKS if all answers were right, WRONG if one was not, FAILED if there was none,
    NOT_RUN if the machine lacks what the question needs. ``text``: the answers in short, or the
    reason. ``error``: the whole error that ranks raised. Of a GPU: ``device``, as
    CUDA_VISIBLE_DEVICES would name it, and its ``answer``. ``without_p2p``: how a pair of GPUs that
    is not right fared with NCCL_P2P_DISABLE=1.
    """

    name: str
    outcome: Outcome
    text: str
    error: str = ""
    device: str = ""
    answer: GpuAnswer | None = None
    without_p2p: Outcome | None = None

    def __str__(self) -> str:
        return f"  {self.name:<22}{self.outcome:<9}{self.text}"


def state_of(name: str, error: str, wrong: str, right: str) -> State:
    """The state of a part whose ranks raised ``error``, or said what was ``wrong``, or neither."""
    outcome = Outcome.FAILED if error else Outcome.WRONG if wrong else Outcome.WORKS
    text = error or wrong
    return State(name, outcome, text.partition("\n")[0] or right, text)


def examine(machine: Machine) -> Iterator[str | State]:
    """Ask the GPUs, their pairs, and the lanes. Yields headings, and below each the states, each as
    soon as it is known.
    """
    gpus: list[State] = []
    if machine.devices:
        if machine.gpus.problem:
            what = "driver, free memory, compute mode, MIG and P2P of the GPUs"
            yield State("NVML", Outcome.NOT_RUN, f"{what}: {machine.gpus.problem}")
            yield ""
        yield "Each GPU alone: start CUDA, and multiply two matrices"
        for gpu in gpu_states(machine.devices):
            gpus.append(gpu)
            yield gpu
        yield ""
    if len(machine.devices) > 1:
        yield "Pairs of GPUs, and all together: sum 16 MiB by NCCL (GB/s: busbw of nccl-tests)"
        yield from _together(machine, gpus)
        yield ""
    yield (
        "Lanes: collectives with known answers; NCCL has a rank on each GPU, nccl_shared and gloo "
        "have 2 ranks"
    )
    yield from lane_states(machine)


def _together(machine: Machine, gpus: Sequence[State]) -> Iterator[State]:
    working = [gpu for gpu in gpus if gpu.outcome is Outcome.WORKS]
    reason = missing("nccl", 2)
    if reason is None and len(working) < 2:
        reason = (
            f"of {len(gpus)} GPUs, {len(working)} {plural(len(working), 'works', 'work')} alone"
        )
    if reason is not None:
        yield State("pairs", Outcome.NOT_RUN, reason)
        return
    yield from pair_states(gpus, machine.gpus)
    if len(working) > 2:  # the sum over two GPUs is that of their pair
        yield all_together(gpus)
    yield node_state()


# The state of every GPU, of every pair of GPUs, and of all of them together.

ALONE_SECONDS = 120.0
"""For the first context of a GPU. The first rank of all also waits for torch's import."""

TOGETHER_SECONDS = 60.0
"""For several GPUs at once to start and connect, and again for their sums."""

PAIR_SECONDS = 30.0
"""The time for a pair. GPUs that cannot reach each other's memory often hang instead of failing."""

ALL_PAIRS_SECONDS = 300.0
"""After that no further pair is tried."""

WITHOUT_P2P = (("NCCL_P2P_DISABLE", "1"),)


def gpu_states(devices: Sequence[str]) -> Iterator[State]:
    """On each GPU in turn, start a context and multiply two matrices."""
    for number, device in enumerate(devices):
        began = time.monotonic()
        answers = ask_ranks(ONE_GPU, [device], on_rank.product, seconds=ALONE_SECONDS)
        seconds = time.monotonic() - began
        answer: GpuAnswer | None = answers.by_rank[0] if answers.by_rank else None
        gpu, wrong = ("", "") if answer is None else (answer.name, answer.error)
        right = f"{gpu}: a product is right, started in {seconds:.1f} s"
        state = state_of(f"cuda:{number}", answers.error, wrong, right)
        yield replace(state, device=device, answer=answer)


def pair_states(
    found: Sequence[State], gpus: Gpus, clock: Callable[[], float] = time.monotonic
) -> Iterator[State]:
    """Sum over each pair of the GPUs that work alone; the last state names pairs left out."""
    pairs = list(
        combinations([n for n, one in enumerate(found) if one.outcome is Outcome.WORKS], 2)
    )
    until = clock() + ALL_PAIRS_SECONDS
    for tried, (first, second) in enumerate(pairs):
        if clock() >= until:
            names = ", ".join(f"{one}-{other}" for one, other in pairs[tried:])
            reason = f"the time limit of {ALL_PAIRS_SECONDS:g} s for all pairs was over"
            yield State("others", Outcome.NOT_RUN, f"{names}: {reason}")
            break
        yield _pair(f"{first}-{second}", [found[first], found[second]], gpus)


def all_together(found: Sequence[State]) -> State:
    """One sum over all the GPUs that work alone."""
    working = [one for one in found if one.outcome is Outcome.WORKS]
    return _sum(f"all {len(working)}", working, TOGETHER_SECONDS)


def _pair(name: str, found: Sequence[State], gpus: Gpus) -> State:
    state = _sum(name, found, PAIR_SECONDS)
    if state.outcome is Outcome.WORKS:
        link = _link(found, gpus)
        return replace(state, text=f"{state.text}; {_link_text(link)}") if link else state
    again = _sum(name, found, PAIR_SECONDS, WITHOUT_P2P)
    text = f"{state.text}; with NCCL_P2P_DISABLE=1: {again.text}"
    return replace(state, text=text, without_p2p=again.outcome)


def _sum(
    name: str, found: Sequence[State], seconds: float, extra: tuple[tuple[str, str], ...] = ()
) -> State:
    """Let these GPUs sum a tensor by NCCL."""
    devices = [one.device for one in found]
    answers = ask_ranks(NCCL, devices, on_rank.all_reduce, seconds=seconds, extra_environment=extra)
    wrong = next((answer.wrong for answer in answers.by_rank if answer.wrong), "")
    # Every rank sends, and receives, this many times the size: NVIDIA's "bus bandwidth".
    ranks = len(devices)
    sent = 2 * (ranks - 1) / ranks * on_rank.SIZE
    taken = max((answer.seconds for answer in answers.by_rank), default=inf)
    right = f"the sum is right, {sent / taken / 1e9:.2f} GB/s"
    return state_of(name, answers.error, wrong, right)


def _link(found: Sequence[State], gpus: Gpus) -> Link | None:
    """The link between two GPUs by NVML, which are recognised by their UUIDs."""
    indices = {plain_uuid(gpu.uuid): gpu.index for gpu in gpus.gpus if gpu.uuid}
    uuids = [plain_uuid(one.answer.uuid) for one in found if one.answer is not None]
    known = [indices[uuid] for uuid in uuids if uuid in indices]
    return gpus.link(known[0], known[1]) if len(known) == 2 else None


def _link_text(link: Link) -> str:
    way = "NVLink" if link.nvlink else f"PCI Express ({link.path or 'path unknown'})"
    if link.p2p is None:
        return f"{way}, P2P unknown"
    return f"P2P over {way}" if link.p2p == "ok" else f"{way}, no P2P: {link.p2p}"


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
        return state_of(name, str(error), "", "")
    wrong = ", ".join(f"{one.collective} ({one.detail})" for one in results if one.wrong)
    right = sum(result.correct for result in results)
    text = f"{right} answers right, {count} {plural(count, 'rank')} started in "
    text += f"{seconds_to_start:.1f} s"
    refused = probe.summarise_refusals(results)
    text += f"; refuses {refused}" if refused else ""
    return state_of(name, "", wrong and f"wrong answers: {wrong}", text)


def _data_parallel(name: str) -> State:
    """One step in one process, over all GPUs, or with 2 replicas on the only one."""
    lane, devices = Lane(name, "gloo", "cuda"), cuda_devices()
    replicas = max(2, len(devices))
    answers = ask_ranks(lane, devices, on_rank.data_parallel_step, replicas, seconds=DEADLINE)
    where = f"over {len(devices)} GPUs"
    if len(devices) == 1:
        where = f"with {replicas} replicas on one GPU"
    right = f"the gradient of one step {where} is that of the big batch"
    return state_of(name, answers.error, "".join(answers.by_rank), right)


# Does NCCL take simulated nodes for hosts, as checks on layouts such as 2x2 rely on?


def node_state() -> State:
    """Let NCCL count the nodes of two ranks on two simulated nodes."""
    if "NCCL_HOSTID" in os.environ:
        return State("nodes", Outcome.NOT_RUN, "NCCL_HOSTID is set, so that NCCL sees one host")
    layout = parse("2x1")
    try:
        counted = nodes_counted(layout)
    except RankFailed as error:
        return state_of("nodes", str(error), "", "")
    if counted is None:
        return State("nodes", Outcome.NOT_RUN, "NCCL's log does not say how many nodes it counts")
    text = f"NCCL counts {counted} of {layout.nodes} simulated nodes"
    return state_of("nodes", "", "" if counted == layout.nodes else text, text)
