"""A case whose ranks hung or were aborted is run once more, with torch's detailed checks on."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ddp_equivalence.measurement.measure import at_work
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks.environment import RERUN_VARIABLE
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut

DETAIL = ((RERUN_VARIABLE, "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"))
"""With this environment torch compares operation, shape and dtype of every collective between the
ranks, at the price of a barrier each. Source: docs.pytorch.org/docs/stable/distributed.html,
"TORCH_DISTRIBUTED_DEBUG".
"""

LEAST_SECONDS = 1.0
TIMES_FIRST_RUN = 3.0
"""The rerun gets this many times the seconds that the first run took until it was stuck, and the
least on top."""


@dataclass(frozen=True)
class Rerun:
    """The result of the rerun: ``failure`` is None if the ranks did not fail again.

    ``ranks_began``: False if the ranks could not even be started. ``cut_short``: True if the rerun
    was not done within its own deadline, which is below that of the case. It may be slow, or hang
    again.
    """

    failure: RankFailed | None
    seconds: float
    ranks_began: bool = True
    cut_short: bool = False


def rerun(request: Request, first: RankFailed, began: float) -> Rerun | None:
    """Run the case again on fresh ranks; None if the ``first`` failure calls for no rerun.

    ``began``: the time at which the first run began, in seconds since the epoch.
    """
    aborted = any(end.kind == "signal" and "SIGABRT" in end.what for end in first.ends)
    if not (aborted or isinstance(first, RanksTimedOut)) or not request.second_look:
        return None
    if request.in_process:
        return None  # a debugger may be attached, and its user looks already
    stuck = max((end.last.at - began for end in first.ends if end.last is not None), default=0.0)
    deadline = min(request.deadline, LEAST_SECONDS + TIMES_FIRST_RUN * max(0.0, stuck))
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
    return Rerun(failure, time.monotonic() - started, ranks_began, cut_short)
