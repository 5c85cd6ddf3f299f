"""A case whose ranks hung or were aborted is run once more, with torch telling more."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ddp_equivalence.measurement.measure import at_work
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks.environment import RERUN_VARIABLE
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut

DETAIL = ((RERUN_VARIABLE, "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"))
"""Torch then compares op, shape and dtype of every collective between the ranks, at the price of
a barrier each. Source: docs.pytorch.org/docs/stable/distributed.html, "TORCH_DISTRIBUTED_DEBUG".
"""

LEAST = 1.0
TIMES = 3.0
"""Seconds that it gets: so many times what the first try took until it was stuck, and the least."""


@dataclass(frozen=True)
class SecondLook:
    """What the second try showed: ``failure`` is None if it did not fail again.

    ``ranks_began``: False if they could not even be started. ``cut_short``: it was not done by its
    own deadline, which is below that of the case: it may be slow, or hang again.
    """

    failure: RankFailed | None
    seconds: float
    ranks_began: bool = True
    cut_short: bool = False


def second_look(request: Request, first: RankFailed, began: float) -> SecondLook | None:
    """Run the case again on fresh ranks; None where the first failure calls for no second.

    ``began``: when the first try did, in seconds since the epoch.
    """
    aborted = any(end.kind == "signal" and "SIGABRT" in end.what for end in first.ends)
    if not (aborted or isinstance(first, RanksTimedOut)) or not request.second_look:
        return None
    if request.in_process:
        return None  # somebody is looking already
    stuck = max((end.last.at - began for end in first.ends if end.last is not None), default=0.0)
    deadline = min(request.deadline, LEAST + TIMES * max(0.0, stuck))
    started = time.monotonic()
    failure, ranks_began = None, False
    try:
        with at_work(request, deadline, fresh=True, environment=DETAIL) as ranks:
            ranks_began = True
            for _ in ranks.collect(deadline):
                pass
    except RankFailed as error:
        failure = error
    late = isinstance(failure, RanksTimedOut) or "monitoredBarrier" in str(failure)
    cut_short = late and deadline < request.deadline
    return SecondLook(failure, time.monotonic() - started, ranks_began, cut_short)
