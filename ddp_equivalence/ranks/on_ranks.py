"""Run any function on warm ranks, and have what each of them returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import Rank, lanes, pickling
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.warm_ranks import warm_ranks


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def on_ranks(
    layout: str,
    function: Callable[..., Any],
    *arguments: Any,
    backend: str = "gloo",
    deadline: float = 60.0,
    collective_deadline: float = 30.0,
) -> tuple[Any, ...]:
    """Call ``function(rank, *arguments)`` on every rank of a layout such as "2x2".

    Returns what each rank returned, in the order of ranks. ``deadline``: seconds for all of it,
    ``collective_deadline`` for one collective; with those of a check, the same ranks serve both.
    Raises BadCase for a layout or backend that there is not, RankFailed if a rank raises or dies,
    RanksTimedOut at the deadline.
    """
    ranks = parse(layout)
    lane = lanes.choose(ranks, backend)
    with warm_ranks().acquire(ranks, lane, collective_deadline) as working:
        working.submit(pickling.dumps(_call, _Call(function, arguments)))
        by_rank = dict(working.collect(deadline))
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def _call(rank: Rank, call: _Call) -> Iterator[Any]:
    try:
        yield call.function(rank, *call.arguments)
    finally:
        new_collectives()  # what was issued here is no evidence of the next check
