"""What the ranks of a request are compared with."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_whole_batch
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.shards import OWN, split
from ddp_equivalence.case.steps import Compare, Steps
from ddp_equivalence.case.training import Training
from ddp_equivalence.comparison.batch_digest import data_by_rank
from ddp_equivalence.comparison.expected import Expected
from ddp_equivalence.diagnosis.catalogue_cache import without_ranks
from ddp_equivalence.measurement.measure import work_of
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.reference import Reference, big_batch


def expected_of(request: Request) -> Expected:
    """The reference of a request, and the digests of what its ranks must be given.

    Raises BadCase whenever the case's model, batch or loss is at fault.
    """
    case = request.case
    if case.is_catalogue and not request.at_each_step and not request.read_order:
        return _expected_of_catalogue(
            without_ranks(case), request.compare, request.training, request.steps
        )
    whole, sizes = build_whole_batch(case, request.steps)
    strategy = request.strategy
    data = data_by_rank(
        case,
        whole,
        sizes,
        undivided=strategy is not None and strategy.one_process,
        together=work_of(request).is_given_all_at_once,
    )
    reference = big_batch(
        case,
        request.compare,
        request.training,
        request.steps,
        (as_read(request, whole), sizes),
        request.at_each_step,
        request.after_clipping,
    )
    return Expected(reference, None if case.is_catalogue else data, request.read_order)


def as_read(request: Request, whole: Any) -> Any:
    """The batch of all steps, in the order in which the steps read it."""
    order = request.read_order
    return take(whole, order, request.case.batch_dims) if order else whole


def check_shards(request: Request, reference: Reference) -> None:
    """Raises BadCase if the examples cannot be assigned to ranks as the case says."""
    case = request.case
    for examples in reference.examples if case.shards != OWN else ():
        split(case.shards, examples, case.ranks.world_size)


@lru_cache(maxsize=128)
def _expected_of_catalogue(
    case: Case, compare: Compare, training: Training, steps: Steps
) -> Expected:
    """Kept for the next check, since many strategies are compared with the same big batch."""
    return Expected(big_batch(case, compare, training, steps))
