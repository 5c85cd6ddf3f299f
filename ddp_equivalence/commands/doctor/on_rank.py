"""The work that the doctor gives to ranks on chosen GPUs: questions with known answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.environment import process_group_environment
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.server import start_method

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
