"""Checks that collectives work, before a difference is blamed on the user's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks import Rank, pickling, process_state
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank_set import Ranks

# Runs collectives on a rank and compares what they return with results worked out beforehand.
#
# The inputs depend on rank and position, so that a result with either of them mixed up is wrong.

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
SIZES = (1, 1031)
LARGER_THAN_A_BUCKET = 300_007
"""Elements of float32 that need more than DDP's first bucket, which holds 1 MiB."""

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda inputs: inputs.sum(0),
    "avg": lambda inputs: inputs.mean(0),
    "max": lambda inputs: inputs.amax(0),
    "min": lambda inputs: inputs.amin(0),
}
"""Op -> the function that reduces inputs of shape (ranks, elements) in float64."""


@dataclass(frozen=True)
class ProbeResult:
    """One collective, in words such as ``broadcast of 1031 float32 on 2 ranks``.

    ``correct``: it returned what it should. ``refused``: the backend's message if it said that it
    cannot do this; that does not count as wrong. ``detail``: what the collective returned
    if that was wrong.
    """

    collective: str
    correct: bool
    refused: str = ""
    detail: str = ""

    @property
    def wrong(self) -> bool:
        return not self.correct and not self.refused


@lru_cache(maxsize=16)
def inputs(ranks: int, elements: int) -> Tensor:
    """The input of each rank: float64, shape (ranks, elements), integers from -3 to 3.

    They are so small that a sum over 64 ranks is exact in bfloat16.
    """
    position, rank = torch.arange(elements), torch.arange(ranks)[:, None]
    return ((position * (rank + 1) + 2 * rank) % 7 - 3).double()


@dataclass(frozen=True)
class _Group:
    """A group of ``size`` ranks, on the rank that is number ``number`` of the group.

    Each method calls one collective and returns what came out and what is right.
    """

    group: dist.ProcessGroup | None
    number: int
    size: int
    device: torch.device

    def own_input(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The input of this rank."""
        return inputs(self.size, elements)[self.number].to(self.device, dtype, copy=True)

    def all_reduce(self, op: str, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        values = self.own_input(size, dtype)
        dist.all_reduce(values, op=getattr(dist.ReduceOp, op.upper()), group=self.group)
        return values, REDUCTIONS[op](inputs(self.size, size))

    def reduce_scatter(self, op: str, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        output = torch.zeros(size, dtype=dtype, device=self.device)
        values = self.own_input(size * self.size, dtype)
        reduce_op = getattr(dist.ReduceOp, op.upper())
        dist.reduce_scatter_tensor(output, values, op=reduce_op, group=self.group)
        reduced = REDUCTIONS[op](inputs(self.size, size * self.size))
        return output, reduced.chunk(self.size)[self.number]

    def all_gather(self, _: str, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        outputs = [torch.zeros(size, dtype=dtype, device=self.device) for _ in range(self.size)]
        dist.all_gather(outputs, self.own_input(size, dtype), group=self.group)
        return torch.cat(outputs), inputs(self.size, size).flatten()

    def broadcast(self, _: str, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """From the group's last rank, whose number is the same among all ranks."""
        values = self.own_input(size, dtype)
        dist.broadcast(values, src=self.size - 1, group=self.group)
        return values, inputs(self.size, size)[-1]


def run(rank: Rank, argument: object) -> Iterator[object]:
    """The work of one rank: yields a tuple of ProbeResults, in the same order on every rank."""
    all_ranks = _Group(dist.group.WORLD, rank.rank, rank.world_size, rank.device)
    results = [_result(all_ranks, *case) for case in _cases()]
    for size, process_group in _subgroups(rank.world_size, dist.group.WORLD):
        if rank.rank < size:
            subgroup = _Group(process_group, rank.rank, size, rank.device)
            for op, name in product(("sum", "avg"), ("all_reduce", "reduce_scatter")):
                results.append(_result(subgroup, name, op, SIZES[-1], torch.float32))
    new_collectives()  # read these collectives now, or the next check takes them for its own
    yield tuple(results)


@cache
def _subgroups(world_size: int, _: object) -> tuple[tuple[int, dist.ProcessGroup], ...]:
    """A group of the first rank alone, and one of the first half of the ranks.

    The second argument is the default group: ``cache`` makes the groups only once for each.
    """
    sizes = sorted({1, max(1, world_size // 2)} - {world_size})
    groups = tuple((size, dist.new_group(list(range(size)))) for size in sizes)
    for _, group in groups:
        process_state.keep_group(group)
    return groups


def _cases() -> Iterator[tuple[str, str, int, torch.dtype]]:
    """The collectives that all ranks call: name, op, elements and dtype."""
    for dtype in DTYPES:
        # The average of integers is not defined.
        ops = ["sum", "avg"] if dtype.is_floating_point else ["sum"]
        more = ["max", "min"] if dtype in (torch.float32, torch.int64) else []
        # Some libraries treat a single element differently. Trying it in one dtype is enough.
        for size in SIZES if dtype is torch.float32 else SIZES[1:]:
            yield from (("all_reduce", op, size, dtype) for op in ops + more)
            yield from (("reduce_scatter", op, size, dtype) for op in ops)
            yield from ((name, "", size, dtype) for name in ("all_gather", "broadcast"))
    yield from (("all_reduce", op, LARGER_THAN_A_BUCKET, torch.float32) for op in ("sum", "avg"))


def _result(group: _Group, name: str, op: str, elements: int, dtype: torch.dtype) -> ProbeResult:
    """Call the collective and compare what it returns with what is right.

    Raises what the collective raises if a connection was lost or the time was over; any other
    error counts as a refusal.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    ranks = "1 rank" if group.size == 1 else f"{group.size} ranks"
    collective = f"{f'{name} {op}'.strip()} of {elements} {dtype_name} on {ranks}"
    try:
        output, expected = getattr(group, name)(op, elements, dtype)
        output = output.double().cpu()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, dist.DistNetworkError) or "timed out" in str(error).lower():
            raise
        return ProbeResult(collective, correct=False, refused=str(error).splitlines()[0])
    # Dividing an integer by a power of two is exact. Any other average may be rounded on each rank.
    exact = not dtype.is_floating_point or group.size & (group.size - 1) == 0
    limit = 0.0 if exact else 4 * group.size * torch.finfo(dtype).eps
    wrong = ~((output - expected).abs() <= limit)  # written so that NaN is wrong
    if not bool(wrong.any()):
        return ProbeResult(collective, correct=True)
    detail = _difference(output, expected, first_wrong=int(wrong.int().argmax()))
    return ProbeResult(collective, correct=False, detail=detail)


def _difference(output: Tensor, expected: Tensor, first_wrong: int) -> str:
    """How the output differs: by a factor if one explains it, otherwise the first wrong element."""
    factor = float((output * expected).sum() / (expected * expected).sum())
    if bool(((output - factor * expected).abs() <= 1e-2 * abs(factor)).all()):
        return f"{factor:.4g} times the right answer"
    return f"element {first_wrong} is {float(output[first_wrong]):g}, not " + (
        f"{float(expected[first_wrong]):g}"
    )


# Runs these collectives on ranks and joins what the ranks say of them.

DEADLINE = 30.0
"""Seconds that the ranks get for all collectives together."""

_known: dict[tuple[str, str, int], tuple[ProbeResult, ...]] = {}
"""(Backend, device type, world size) -> the results found earlier in this process."""


def probe_ranks_once(ranks: Ranks, layout: Layout, lane: Lane) -> tuple[ProbeResult, ...]:
    """Probe a lane, once in this process for each number of ranks.

    Raises RankFailed or RanksTimedOut.
    """
    key = lane.backend, lane.device_type, layout.world_size
    if key not in _known:
        _known[key] = probe_ranks(ranks)
    return _known[key]


def probe_ranks(
    ranks: Ranks, deadline: float = DEADLINE, work: Callable[..., object] = run
) -> tuple[ProbeResult, ...]:
    """Probe these ranks: one result per collective, wrong if it was wrong on any rank.

    Raises RankFailed or RanksTimedOut.
    """
    ranks.submit(pickling.dumps(work, None))
    by_rank: dict[int, tuple[ProbeResult, ...]] = dict(ranks.collect(deadline))
    return _joined(dict(sorted(by_rank.items())))


def summarise_refusals(results: tuple[ProbeResult, ...]) -> str:
    """The refused kinds of collectives, with the first reason that was given; "" if there are none.

    For example ``all_reduce avg of float16 (the first message of the backend)``.
    """
    refused = [result for result in results if result.refused]
    if not refused:
        return ""
    kinds = dict.fromkeys(_kind(result.collective) for result in refused)
    return f"{', '.join(kinds)} ({refused[0].refused})"


def _kind(collective: str) -> str:
    """``all_reduce avg of 7 float16 on 2 ranks`` becomes ``all_reduce avg of float16``."""
    name, _, rest = collective.partition(" of ")
    return f"{name} of {rest.split()[1]}"


def _joined(by_rank: Mapping[int, tuple[ProbeResult, ...]]) -> tuple[ProbeResult, ...]:
    joined: dict[str, ProbeResult] = {}
    for rank, results in by_rank.items():
        for result in results:
            before = joined.setdefault(result.collective, _with_rank(rank, result))
            if bool(before.refused) != bool(result.refused):
                detail = "refused on some ranks only"
                joined[result.collective] = replace(
                    before, correct=False, refused="", detail=detail
                )
            elif result.wrong and not before.wrong:
                joined[result.collective] = _with_rank(rank, result)
    return tuple(joined.values())


def _with_rank(rank: int, result: ProbeResult) -> ProbeResult:
    return replace(result, detail=f"rank {rank}: {result.detail}") if result.wrong else result
