"""How far rounding moves the big batch on one device of the kind that the ranks compute on.

The reference and its rounding are computed on the CPU. A GPU has other kernels, which round
differently: they add up in another order, and may compute products in a lower precision. Where a
difference lies beyond the limits of the CPU, and may be the rounding of a GPU, rank 0 computes the
big batch on its own device, as ``comparison.rounding`` does on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from ddp_equivalence.case.build import build_batches
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.steps import Compare, Steps
from ddp_equivalence.case.training import Training
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.rounding import Rounding, measure_more, measure_rounding
from ddp_equivalence.comparison.tolerance import USELESS
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.reference import big_batch


@dataclass(frozen=True)
class RoundingWork:
    """The big batch whose rounding rank 0 measures. ``autocast``: as in ``measure_rounding``."""

    case: Case
    compare: Compare
    training: Training
    steps: Steps
    autocast: torch.dtype | None
    at_each_step: bool = False
    after_clipping: bool = False


def may_be_that_of_a_device(comparison: Comparison, request: Request) -> bool:
    """True if the ranks compute on another kind of device than the reference, and if a limit that
    could still show something might accept what they hold.
    """
    if request.lane.device_type == "cpu" or request.in_process or request.case.exact:
        return False
    if comparison.same or comparison.structure or not comparison.ranks_agree:
        return False
    telling = [one for one in comparison.parameters if one.norm > 0 and not one.limit.only_rounding]
    return all(one.error < USELESS for one in telling)


def rounding_on_device(
    ranks: RankSet, request: Request, autocast: torch.dtype | None, deadline: float
) -> Rounding | None:
    """The rounding of all runs that are ever made, on the device of rank 0; None if they fail."""
    if ranks.broken:
        return None
    work = RoundingWork(
        request.case,
        request.compare,
        request.training,
        request.steps,
        autocast,
        request.at_each_step,
        request.after_clipping,
    )
    with suppress(RankFailed):  # what the CPU's limits say then stands
        ranks.submit(pickling.dumps(run, work))
        rounding: Rounding | None = dict(ranks.collect(deadline)).get(0)
        return rounding
    return None


def run(rank: Rank, work: RoundingWork) -> Iterator[Rounding | None]:
    """Yield the rounding on rank 0, None if the model or the loss cannot run there as they are."""
    if rank.rank == 0:
        try:
            rounding = _measure(rank, work)
        except Exception:  # the user's loss may need what only the step prepares, such as autocast
            rounding = None
        yield rounding


def _measure(rank: Rank, work: RoundingWork) -> Rounding:
    reference = big_batch(
        work.case,
        work.compare,
        work.training,
        work.steps,
        at_each_step=work.at_each_step,
        after_clipping=work.after_clipping,
    )
    batches = build_batches(work.case, work.steps)
    rounding = measure_rounding(reference, batches, work.autocast, rank.device)
    return measure_more(reference, rounding, batches, work.autocast, rank.device)
