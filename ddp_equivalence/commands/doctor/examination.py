"""Questions with known answers for every part of this machine, the facts about it, and the answers.

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
from itertools import combinations, permutations
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import pickling, probe
from ddp_equivalence.ranks.backend_names import LANES, NCCL_BACKENDS, NCCL_SHARED
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.environment import process_group_environment
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpus import Gpus, gpus, plain_uuid, visible_gpus
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, missing, shared_lane
from ddp_equivalence.ranks.nccl import nodes_counted
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.server import start_method
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from ddp_equivalence.report.text import plural

# The work that the doctor gives to ranks on CUDA: questions with known answers.
#
# Each function yields one answer. All numbers are small integers, so the right answers are exact.

ELEMENTS = 2**22
SIZE = 4 * ELEMENTS
"""So many elements of float32, and so many bytes (16 MiB), are reduced over all ranks: enough to
keep a link busy."""

REPETITIONS = 5
"""The time of one all_reduce is taken over so many."""

SIDE = 256
"""The matrices that are multiplied have so many rows and columns."""

COPIED = 2**20
"""So many elements are copied from each GPU to each other one."""

LIMIT = 1e-10
"""The largest relative error of a float64 gradient. Rounding explains 1e-15."""


@dataclass(frozen=True)
class GpuAnswer:
    """One GPU as CUDA describes it on a rank, and whether it computes.

    ``uuid``: with or without the "GPU-" before it. ``error``: what was raised by a product of two
    matrices, or what was wrong with it; "" if it was right.
    """

    name: str
    uuid: str
    error: str


@dataclass(frozen=True)
class AllReduceAnswer:
    """``seconds``: the time of one sum of SIZE bytes. ``wrong``: "" or what was wrong."""

    seconds: float
    wrong: str


def product(rank: Rank, argument: object) -> Iterator[GpuAnswer]:
    """Multiply two matrices on this rank's GPU."""
    properties = torch.cuda.get_device_properties(rank.device)
    yield GpuAnswer(
        name=properties.name,
        uuid=str(getattr(properties, "uuid", "")),
        error=error_of_product(rank.device),
    )


def error_of_product(device: torch.device) -> str:
    """The error of a product of two matrices on this device, or how it is wrong; "" if right."""
    left = _integers(SIDE * SIDE, 1, torch.device("cpu")).reshape(SIDE, SIDE)
    right = _integers(SIDE * SIDE, 2, torch.device("cpu")).reshape(SIDE, SIDE)
    try:
        measured = (left.to(device) @ right.to(device)).cpu()
    except RuntimeError as error:
        return str(error)
    wrong = int((measured != left @ right).sum())
    return f"{wrong} of {SIDE * SIDE} elements of a product are wrong" if wrong else ""


def all_reduce(rank: Rank, argument: object) -> Iterator[AllReduceAnswer]:
    """Sum a large tensor over all ranks, check every element, and take the time."""
    values = _integers(ELEMENTS, rank.rank, rank.device)
    dist.all_reduce(values)
    expected = torch.zeros_like(values)
    for other in range(rank.world_size):
        expected += _integers(ELEMENTS, other, rank.device)
    wrong = int((values != expected).sum())
    values.zero_()
    torch.cuda.synchronize(rank.device)
    began = time.perf_counter()
    for _ in range(REPETITIONS):
        dist.all_reduce(values)
    torch.cuda.synchronize(rank.device)
    seconds = (time.perf_counter() - began) / REPETITIONS
    new_collectives()  # read these collectives now, as every work does
    text = f"{wrong} of {ELEMENTS} elements of the sum are wrong on rank {rank}" if wrong else ""
    yield AllReduceAnswer(seconds, text)


def data_parallel_step(rank: Rank, replicas: int) -> Iterator[str]:
    """Copy between all GPUs of this process, then do one step of nn.DataParallel on them.

    Several of the ``replicas`` are on one GPU if there are fewer. Yields what was wrong, or "".
    """
    count = torch.cuda.device_count()
    wrong = [
        f"a copy from cuda:{source} to cuda:{target} arrived changed"
        for source, target in permutations(range(count), 2)
        if not _copy_is_right(source, target)
    ]
    devices = [number % count for number in range(replicas)]
    called, error = _step(rank.device, devices)
    if called != (expected := sorted(f"cuda:{device}" for device in devices)):
        wrong.append(f"replicas ran on {', '.join(called)} and not on {', '.join(expected)}")
    if not error <= LIMIT:  # written so that NaN is wrong
        wrong.append(f"the gradient differs from the big batch's by {error:.2g} of its size")
    yield "; ".join(wrong)


def _copy_is_right(source: int, target: int) -> bool:
    original = _integers(COPIED, source, torch.device("cuda", source))
    return torch.equal(original.to(torch.device("cuda", target)).cpu(), original.cpu())


def _step(device: torch.device, device_ids: Sequence[int]) -> tuple[list[str], float]:
    """The devices on which a replica was called, and the relative error of the gradient."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double().to(device)
    rows = (
        torch.linspace(-1, 1, 4 * len(device_ids) * 5, dtype=torch.float64)
        .reshape(-1, 5)
        .to(device)
    )
    model(rows).square().mean().backward()
    expected = _gradient(model)
    called: list[str] = []

    def note_device(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        called.append(str(arguments[0].device))

    model.zero_grad()
    model.register_forward_pre_hook(note_device)
    nn.DataParallel(model, device_ids=device_ids)(rows).square().mean().backward()
    measured = _gradient(model)
    return sorted(called), float((measured - expected).abs().max() / expected.abs().max())


def _gradient(model: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.cat([grad.flatten() for grad in gradients if grad is not None]).clone()


def _integers(elements: int, rank: int, device: torch.device) -> Tensor:
    """Integers from -3 to 3 in float32, which depend on position and rank."""
    position = torch.arange(elements, dtype=torch.int32, device=device)
    return ((position * (rank + 1) + 2 * rank) % 7 - 3).float()


# Starts ranks on chosen GPUs for one piece of work, and stops them.
#
# No rank is kept, because on a GPU in the compute mode EXCLUSIVE_PROCESS it would be in the way
# of the next ones.

NCCL = Lane("nccl", "nccl", "cuda")
ONE_GPU = Lane("gloo_cuda", "gloo", "cuda")


@dataclass(frozen=True)
class Answers:
    """``by_rank``: the answer of each rank; () if ranks failed. ``error``: then the error."""

    by_rank: tuple[Any, ...] = ()
    error: str = ""


def ask_ranks(
    lane: Lane,
    devices: Sequence[str],
    work: Callable[..., Iterator[Any]],
    argument: object = None,
    *,
    seconds: float,
    extra_environment: tuple[tuple[str, str], ...] = (),
) -> Answers:
    """Let one rank for each of these GPUs do the work, which yields one answer on each.

    On a lane that drives all GPUs a single rank gets all of them. ``seconds``: the limit for
    starting, and again for the work.
    """
    count = 1 if lane.drives_all_gpus else len(devices)
    rank_set = RankSet(
        parse(f"1x{count}"),
        lane,
        seconds,
        tuple(sorted((dict(process_group_environment()) | dict(extra_environment)).items())),
        tuple(devices),
        start_method(),
        seconds,
    )
    try:
        rank_set.start()
        rank_set.submit(pickling.dumps(work, argument))
        answers = dict(rank_set.collect(seconds))
    except (RankFailed, OSError) as error:
        rank_set.broken = True
        return Answers(error=_what_failed(error))
    finally:
        rank_set.stop()
    return Answers(tuple(answer for _, answer in sorted(answers.items())))


def _what_failed(error: BaseException) -> str:
    """The error, with what the first rank that failed has printed: NCCL explains itself there."""
    ends = getattr(error, "ends", ())
    output = ends[0].output.strip() if ends else ""
    return f"{error}\n{output}".strip()


# The facts about this machine.


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
    count = len(working)
    reason = missing("nccl", 2)
    if reason is None and count < 2:
        reason = f"of {len(gpus)} GPUs, {count} {plural(count, 'works', 'work')} alone"
    if reason is not None:
        yield State("pairs", Outcome.NOT_RUN, reason)
        return
    yield from pair_states(working, machine.gpus)
    if count > 2:  # the sum over two GPUs is that of their pair
        yield sum_over(f"all {count}", working, TOGETHER_SECONDS)
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
        answers = ask_ranks(ONE_GPU, [device], product, seconds=ALONE_SECONDS)
        seconds = time.monotonic() - began
        answer: GpuAnswer | None = answers.by_rank[0] if answers.by_rank else None
        gpu, wrong = ("", "") if answer is None else (answer.name, answer.error)
        right = f"{gpu}: a product is right, started in {seconds:.1f} s"
        state = state_of(f"cuda:{number}", answers.error, wrong, right)
        yield replace(state, device=device, answer=answer)


def pair_states(
    working: Sequence[State], gpus: Gpus, clock: Callable[[], float] = time.monotonic
) -> Iterator[State]:
    """Sum over each pair of the GPUs that work alone; the last state names pairs left out."""
    pairs = list(combinations(working, 2))
    names = ["-".join(one.name.removeprefix("cuda:") for one in pair) for pair in pairs]
    until = clock() + ALL_PAIRS_SECONDS
    for number, (name, pair) in enumerate(zip(names, pairs, strict=True)):
        if clock() >= until:
            reason = f"the time limit of {ALL_PAIRS_SECONDS:g} s for all pairs was over"
            yield State("others", Outcome.NOT_RUN, f"{', '.join(names[number:])}: {reason}")
            break
        state = sum_over(name, pair, PAIR_SECONDS)
        if state.outcome is Outcome.WORKS:
            link = _link_text(pair, gpus)
            yield replace(state, text=f"{state.text}; {link}") if link else state
            continue
        again = sum_over(name, pair, PAIR_SECONDS, WITHOUT_P2P)
        text = f"{state.text}; with NCCL_P2P_DISABLE=1: {again.text}"
        yield replace(state, text=text, without_p2p=again.outcome)


def sum_over(
    name: str, found: Sequence[State], seconds: float, extra: tuple[tuple[str, str], ...] = ()
) -> State:
    """Let these GPUs sum a tensor by NCCL."""
    devices = [one.device for one in found]
    answers = ask_ranks(NCCL, devices, all_reduce, seconds=seconds, extra_environment=extra)
    wrong = next((answer.wrong for answer in answers.by_rank if answer.wrong), "")
    # Every rank sends, and receives, this many times the size: NVIDIA's "bus bandwidth".
    ranks = len(devices)
    sent = 2 * (ranks - 1) / ranks * SIZE
    taken = max((answer.seconds for answer in answers.by_rank), default=inf)
    right = f"the sum is right, {sent / taken / 1e9:.2f} GB/s"
    return state_of(name, answers.error, wrong, right)


def _link_text(found: Sequence[State], gpus: Gpus) -> str:
    """The link between two GPUs by NVML, which are recognised by their UUIDs; "" if not known."""
    indices = {plain_uuid(gpu.uuid): gpu.index for gpu in gpus.gpus if gpu.uuid}
    uuids = [plain_uuid(one.answer.uuid) for one in found if one.answer is not None]
    known = [indices[uuid] for uuid in uuids if uuid in indices]
    link = gpus.link(known[0], known[1]) if len(known) == 2 else None
    if link is None:
        return ""
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
        # NCCL gets a rank on every GPU; a single one is enough to ask whether it starts. On the
        # other lanes there are 2, or 2 replicas, so that shared lanes are asked with one GPU.
        ranks = len(cuda_devices()) or 2 if name in NCCL_BACKENDS else 2
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
    answers = ask_ranks(lane, devices, data_parallel_step, replicas, seconds=DEADLINE)
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
