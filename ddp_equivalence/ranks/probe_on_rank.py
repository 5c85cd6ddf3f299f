"""What a rank asks of its collectives, with known answers: other values at each place and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.ranks import Rank, process_state
from ddp_equivalence.ranks.collectives import new_collectives

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
SIZES = (1, 1031)
OVER_A_BUCKET = 300_007
"""Float32 elements, more than DDP's first bucket of 1 MiB holds."""

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda of_ranks: of_ranks.sum(0),
    "avg": lambda of_ranks: of_ranks.mean(0),
    "max": lambda of_ranks: of_ranks.amax(0),
    "min": lambda of_ranks: of_ranks.amin(0),
}
"""What an op makes of shape (ranks, elements) in float64."""


@dataclass(frozen=True)
class Answer:
    """One collective: ``what`` was asked, and whether the answer was ``right``.

    ``refused``: the backend's own words, where it said that it cannot; that is no wrong answer.
    ``detail``: of a wrong one, what it was instead.
    """

    what: str
    right: bool
    refused: str = ""
    detail: str = ""

    @property
    def wrong(self) -> bool:
        return not self.right and not self.refused


@dataclass(frozen=True)
class _Group:
    """Some of the ranks, seen from one of them: ``place`` is its own in ``size``."""

    group: dist.ProcessGroup | None
    place: int
    size: int
    device: torch.device

    def mine(self, elements: int, dtype: torch.dtype) -> Tensor:
        """What this rank brings."""
        return brought(self.size, elements)[self.place].to(self.device, dtype, copy=True)

    def right(self, op: str, elements: int) -> Tensor:
        """What an op makes of what all ranks bring."""
        return _reduced(op, self.size, elements)


@lru_cache(maxsize=16)
def brought(ranks: int, elements: int) -> Tensor:
    """What each rank brings: float64, shape (ranks, elements).

    From -3 to 3, differing by rank and by position: sums over 64 ranks are exact in bfloat16.
    """
    position, place = torch.arange(elements), torch.arange(ranks)[:, None]
    return ((position * (place + 1) + 2 * place) % 7 - 3).double()


@lru_cache(maxsize=64)
def _reduced(op: str, ranks: int, elements: int) -> Tensor:
    return REDUCTIONS[op](brought(ranks, elements))


def run(rank: Rank, payload: object) -> Iterator[object]:
    """On one rank: yield a tuple of Answers, the same questions in the same order on every rank."""
    everybody = _Group(dist.group.WORLD, rank.rank, rank.world_size, rank.device)
    answers = [answer for dtype in DTYPES for answer in _of_dtype(everybody, dtype)]
    answers += [_all_reduce(everybody, op, OVER_A_BUCKET, torch.float32) for op in ("sum", "avg")]
    for size, group in _parts(rank.world_size, dist.group.WORLD):
        if rank.rank < size:
            part = _Group(group, rank.rank, size, rank.device)
            for op in ("sum", "avg"):
                answers.append(_all_reduce(part, op, SIZES[-1], torch.float32))
                answers.append(_reduce_scatter(part, op, SIZES[-1], torch.float32))
    new_collectives()  # they are none of the next work's
    yield tuple(answers)


@cache
def _parts(world_size: int, _: object) -> tuple[tuple[int, dist.ProcessGroup], ...]:
    """The first rank alone, and the first half of the ranks; made once in the life of the ranks."""
    sizes = sorted({1, max(1, world_size // 2)} - {world_size})
    groups = tuple((size, dist.new_group(list(range(size)))) for size in sizes)
    for _, group in groups:
        process_state.keep_group(group)
    return groups


def _of_dtype(group: _Group, dtype: torch.dtype) -> Iterator[Answer]:
    # An average of integers has no right answer.
    ops = ["sum", "avg"] if dtype.is_floating_point else ["sum"]
    if dtype in (torch.float32, torch.int64):
        ops += ["max", "min"]
    # A single element is another path in some libraries, whatever its dtype.
    for size in SIZES if dtype is torch.float32 else SIZES[1:]:
        for op in ops:
            yield _all_reduce(group, op, size, dtype)
            if op in ("sum", "avg"):
                yield _reduce_scatter(group, op, size, dtype)
        yield _all_gather(group, size, dtype)
        yield _broadcast(group, size, dtype)


def _all_reduce(group: _Group, op: str, size: int, dtype: torch.dtype) -> Answer:
    def ask() -> Tensor:
        values = group.mine(size, dtype)
        dist.all_reduce(values, op=_op(op), group=group.group)
        return values

    return _asked(f"all_reduce {op}", group, ask, group.right(op, size), dtype)


def _reduce_scatter(group: _Group, op: str, size: int, dtype: torch.dtype) -> Answer:
    def ask() -> Tensor:
        found = torch.zeros(size, dtype=dtype, device=group.device)
        values = group.mine(size * group.size, dtype)
        dist.reduce_scatter_tensor(found, values, op=_op(op), group=group.group)
        return found

    own = group.right(op, size * group.size).chunk(group.size)[group.place]
    return _asked(f"reduce_scatter {op}", group, ask, own, dtype)


def _all_gather(group: _Group, size: int, dtype: torch.dtype) -> Answer:
    def ask() -> Tensor:
        found = [torch.zeros(size, dtype=dtype, device=group.device) for _ in range(group.size)]
        dist.all_gather(found, group.mine(size, dtype), group=group.group)
        return torch.cat(found)

    return _asked("all_gather", group, ask, brought(group.size, size).flatten(), dtype)


def _broadcast(group: _Group, size: int, dtype: torch.dtype) -> Answer:
    """From the last rank, which in a group of all is the last one of the layout."""

    def ask() -> Tensor:
        values = group.mine(size, dtype)
        dist.broadcast(values, src=group.size - 1, group=group.group)
        return values

    return _asked("broadcast", group, ask, brought(group.size, size)[-1], dtype)


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _asked(
    what: str, group: _Group, ask: Callable[[], Tensor], right: Tensor, dtype: torch.dtype
) -> Answer:
    elements = len(right) // (group.size if what == "all_gather" else 1)
    kind = str(dtype).removeprefix("torch.")
    ranks = "1 rank" if group.size == 1 else f"{group.size} ranks"
    what = f"{what} of {elements} {kind} on {ranks}"
    try:
        found = ask().double().cpu()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, dist.DistNetworkError) or "timed out" in str(error).lower():
            raise  # that is no refusal
        return Answer(what, right=False, refused=str(error).splitlines()[0])
    # Integers over a power of two are exact; other averages are rounded, once a rank at most.
    exact = not dtype.is_floating_point or group.size & (group.size - 1) == 0
    allowed = 0.0 if exact else 4 * group.size * torch.finfo(dtype).eps
    wrong = ~((found - right).abs() <= allowed)  # NaN is not within anything
    if not bool(wrong.any()):
        return Answer(what, right=True)
    return Answer(what, right=False, detail=_instead(found, right, first=int(wrong.int().argmax())))


def _instead(found: Tensor, right: Tensor, first: int) -> str:
    """What it is, where ``first`` is the first element that is wrong."""
    factor = float((found * right).sum() / (right * right).sum())
    if bool(((found - factor * right).abs() <= 1e-2 * abs(factor)).all()):
        return f"{factor:.4g} times the right answer"
    return f"element {first} is {float(found[first]):g}, not {float(right[first]):g}"
