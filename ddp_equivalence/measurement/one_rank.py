"""Runs a step on its ranks and on one rank alone, and records the operations of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.shards import OWN
from ddp_equivalence.measurement.measure import at_work
from ddp_equivalence.measurement.operations import Operations
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.ranks.failure import RankFailed


@dataclass(frozen=True)
class OneRank:
    """The operations of a step ``by_rank``, and those of the same step on ``alone``: one rank that
    is given the whole batch.
    """

    by_rank: Mapping[int, Operations]
    alone: Operations


def operations_beside_one_rank(
    request: Request, deadline: float, order: tuple[int, ...] = ()
) -> OneRank | None:
    """Run the step twice more: on its ranks, and on one rank with the whole batch in this order.
    If it has only one rank, it runs once.

    None if the step cannot run on one rank, or if there is too much to record. ``deadline``:
    seconds for each of the two runs.
    """
    has_one = request.processes.world_size == 1
    if request.in_process or not request.second_look:
        return None
    alone = None if has_one else operations_on_one_rank(request, deadline, order)
    if alone is None and not has_one:
        return None
    try:
        by_rank = _operations(request, deadline)
    except (RankFailed, BadCase):
        return None
    if len(by_rank) != request.processes.world_size:
        return None
    if not all(one.complete for one in by_rank.values()):
        return None
    return OneRank(by_rank, alone or by_rank[0])


def operations_on_one_rank(
    request: Request, deadline: float, order: tuple[int, ...] = ()
) -> Operations | None:
    """Run the step once more, on one rank with the whole batch in this order; None as above."""
    if request.in_process or not request.second_look or request.processes.world_size == 1:
        return None
    shards = OWN if request.case.shards == OWN else "equal"
    try:
        case = replace(request.case, layout="1x1", shards=shards)
        alone = _operations(replace(request, case=case), deadline, order)
    except (RankFailed, BadCase):
        return None
    return alone[0] if alone and alone[0].complete else None


def _operations(
    request: Request, deadline: float, order: tuple[int, ...] = ()
) -> dict[int, Operations]:
    with at_work(request, deadline, request.fresh, log_operations=True, order=order) as ranks:
        results = dict(ranks.collect(deadline))
    return {
        rank: result.operations
        for rank, result in sorted(results.items())
        if isinstance(result, Evidence) and result.operations is not None
    }
