"""Runs a case whose ranks hung or were aborted once more, with torch's detailed checks on."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from ddp_equivalence.measurement.measure import at_work
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks.environment import RERUN_VARIABLE
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut

DETAIL = ((RERUN_VARIABLE, "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"))
"""With this environment torch compares the operation, shape and dtype of every collective between
the ranks. This costs a barrier for each collective.

Source: docs.pytorch.org/docs/stable/distributed.html, "TORCH_DISTRIBUTED_DEBUG".
"""

EXTRA_SECONDS = 1.0
TIMES_FIRST_RUN = 3.0
"""The rerun gets ``TIMES_FIRST_RUN`` times the seconds after which the first run was stuck, and
``EXTRA_SECONDS`` more."""


@dataclass(frozen=True)
class Rerun:
    """The result of the rerun: ``failure`` is None if the ranks did not fail again.

    ``ranks_began``: False if the ranks could not even be started. ``cut_short``: True if the rerun
    was stopped at its own deadline, which is shorter than that of the case. It is then not known
    whether the rerun hung again or was only slow.
    """

    failure: RankFailed | None
    seconds: float
    ranks_began: bool = True
    cut_short: bool = False


def rerun(request: Request, first: RankFailed, began: float) -> Rerun | None:
    """Run the case again on fresh ranks; None if the ``first`` failure calls for no rerun.

    ``began``: the time at which the first run began, in seconds since the epoch.
    """
    aborted = any(end.signal_number == signal.SIGABRT for end in first.ends)
    if not (aborted or isinstance(first, RanksTimedOut)) or not request.second_look:
        return None
    if request.in_process:
        return None  # the user may be debugging the step already
    stuck = max((end.last.at - began for end in first.ends if end.last is not None), default=0.0)
    deadline = min(request.deadline, EXTRA_SECONDS + TIMES_FIRST_RUN * max(0.0, stuck))
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
