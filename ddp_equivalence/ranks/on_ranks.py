"""Calls any function on warm ranks and returns what it returned on each of them."""

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

    Returns a tuple with what each rank returned, in the order of ranks. ``deadline``: seconds for
    the whole call. ``collective_deadline``: seconds for one collective; checks with the same value
    use the same warm ranks. Raises BadCase for an unknown layout or backend, RankFailed if a rank
    raises or dies, RanksTimedOut at the deadline.
    """
    parsed = parse(layout)
    lane = lanes.choose(parsed, backend)
    with warm_ranks().acquire(parsed, lane, collective_deadline) as rank_set:
        rank_set.submit(pickling.dumps(_call, _Call(function, arguments)))
        by_rank = dict(rank_set.collect(deadline))
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def _call(rank: Rank, call: _Call) -> Iterator[Any]:
    try:
        yield call.function(rank, *call.arguments)
    finally:
        new_collectives()  # read these collectives now, or the next check takes them for its own
