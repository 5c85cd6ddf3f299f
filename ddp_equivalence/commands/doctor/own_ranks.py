"""Starts ranks on chosen GPUs for one piece of work, and stops them.

No rank is kept, because on a GPU in the compute mode EXCLUSIVE_PROCESS it would be in the way of
the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.environment import process_group_environment
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.server import start_method

NCCL = Lane("nccl", "nccl", "cuda")
ONE_GPU = Lane("gloo_cuda", "gloo", "cuda")


@dataclass(frozen=True)
class Answers:
    """``by_rank``: what the work yielded on each rank; () if ranks failed.

    ``error``: then the error; ``timed_out``: it was that they did not answer in time.
    """

    by_rank: tuple[Any, ...] = ()
    error: str = ""
    timed_out: bool = False


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
        return Answers(error=_what_failed(error), timed_out=isinstance(error, RanksTimedOut))
    finally:
        rank_set.stop()
    return Answers(tuple(answer for _, answer in sorted(answers.items())))


def _what_failed(error: BaseException) -> str:
    """The error, with what the first rank that failed has printed: NCCL explains itself there."""
    ends = getattr(error, "ends", ())
    output = ends[0].output.strip() if ends else ""
    return f"{error}\n{output}".strip()
