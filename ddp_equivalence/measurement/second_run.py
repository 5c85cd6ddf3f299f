"""Runs a step that differs a second time, and watches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.measurement.measure import at_work, message_for
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.rank_set import RankSet


@dataclass(frozen=True)
class SecondRun:
    """What was seen of each rank while the step ran a second time.

    ``why_not``: why there was no second run. ``needs_fresh_ranks``: the first run has left ranks
    that can do no more work.
    """

    by_rank: Mapping[int, Observation] = field(default_factory=dict)
    why_not: str = ""
    needs_fresh_ranks: bool = False


def observe(
    ranks: RankSet,
    request: Request,
    deadline: float,
    sample: ElementSample[str],
    log_draws: bool = False,
) -> SecondRun:
    """Run the step a second time on the same ranks, and watch it.

    ``log_draws``: also record the random numbers that the ranks draw.
    """
    if request.in_process:
        return SecondRun(why_not="rank 0 was the process that you started (in_process)")
    if not request.second_look:
        return SecondRun(why_not="this run forbids it (--ddp-no-second-look, second_look=False)")
    if ranks.broken:
        return SecondRun(needs_fresh_ranks=True)
    try:
        ranks.submit(message_for(request, sample, log_draws=log_draws))
        return SecondRun(_observations(ranks, deadline))
    except RankFailed as error:
        return SecondRun(why_not=f"the ranks failed in it: {_first_line(error)}")


def observe_on_fresh_ranks(
    request: Request, deadline: float, sample: ElementSample[str], log_draws: bool = False
) -> SecondRun:
    """Run the step a second time on new ranks, and watch it.

    A step that makes a process group of its own leaves ranks that can do no more work.
    """
    try:
        with at_work(request, deadline, fresh=True, observe=sample, log_draws=log_draws) as ranks:
            return SecondRun(_observations(ranks, deadline))
    except RankFailed as error:
        return SecondRun(why_not=f"new ranks failed in it: {_first_line(error)}")


def _observations(ranks: RankSet, deadline: float) -> dict[int, Observation]:
    results = dict(ranks.collect(deadline))
    return {
        rank: result.observed
        for rank, result in sorted(results.items())
        if isinstance(result, Evidence) and result.observed is not None
    }


def _first_line(error: RankFailed) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
