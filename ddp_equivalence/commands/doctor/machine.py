"""The facts about this machine, and the answers of its GPUs to questions with known answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from pathlib import Path

import torch

from ddp_equivalence.commands.doctor import on_rank
from ddp_equivalence.commands.doctor.on_rank import NCCL, ONE_GPU, GpuAnswer, ask_ranks
from ddp_equivalence.ranks.gpus import Gpus, Link, gpus, plain_uuid
from ddp_equivalence.ranks.lanes import cuda_devices

SHARED_MEMORY = "/dev/shm"
DEVICE_FILES = "nvidia[0-9]*"
AMD_DEVICE_FILE = "kfd"


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
    return Machine(
        gpus=gpus(),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        devices=cuda_devices(),
        variable=variable,
        visible=os.environ.get(variable),
        shared_memory=_size(SHARED_MEMORY),
        device_files=_device_files(),
    )


def _size(folder: str) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks


def _device_files() -> tuple[str, ...]:
    folder = Path("/dev")
    files = [*folder.glob(DEVICE_FILES), *folder.glob(AMD_DEVICE_FILE)]
    return tuple(sorted(file.name for file in files))


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
        error = answers.error if answer is None else answer.error
        outcome = Outcome.WORKS
        if error:
            outcome = Outcome.FAILED if answer is None else Outcome.WRONG
        name = "" if answer is None else answer.name
        text = _first_line(error) or f"{name}: a product is right, started in {seconds:.1f} s"
        yield State(f"cuda:{number}", outcome, text, error, device, answer)


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
    if not answers.by_rank:
        return State(name, Outcome.FAILED, _first_line(answers.error), answers.error)
    wrong = [answer.wrong for answer in answers.by_rank if answer.wrong]
    if wrong:
        return State(name, Outcome.WRONG, wrong[0], wrong[0])
    # Every rank sends, and receives, this many times the size: NVIDIA's "bus bandwidth".
    ranks = len(answers.by_rank)
    sent = 2 * (ranks - 1) / ranks * answers.by_rank[0].size
    taken = max(answer.seconds for answer in answers.by_rank)
    return State(name, Outcome.WORKS, f"the sum is right, {sent / taken / 1e9:.2f} GB/s")


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


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")
