"""Send a case to the ranks and compare what they send back while it arrives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.case import name_of
from ddp_equivalence.comparison import Comparator, Comparison
from ddp_equivalence.errors import BadCase, RankFailed
from ddp_equivalence.gradients import RawChunk
from ddp_equivalence.rank_work import Evidence, Work, run
from ddp_equivalence.ranks import attribution, carry
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.warm import Environment, warm_ranks
from ddp_equivalence.reference import Reference
from ddp_equivalence.request import Request
from ddp_equivalence.tolerance import Tolerance


@dataclass
class Measurement:
    """What came back from the ranks.

    ``measured``: the gradients themselves, where they were to be kept. ``output``: what each rank
    printed. ``changed``: rank -> what its process was left with, as phrases; ``left``: the same as
    an error with an entry for every rank.
    """

    comparison: Comparison
    evidence: Mapping[int, Evidence]
    measured: Mapping[int, dict[str, Tensor | None]]
    output: Mapping[int, str]
    changed: Mapping[int, tuple[str, ...]]
    left: RankFailed | None


@contextmanager
def at_work(
    request: Request, deadline: float, fresh: bool, environment: Environment = ()
) -> Iterator[RankSet]:
    """Ranks that have begun with the request, until the end of the block.

    Raises BadCase if the step cannot travel, RankFailed if ranks cannot be started.
    """
    work = Work(request.case, request.step, request.compare, request.lr, request.steps)
    try:
        message = carry.dumps(run, work)
    except Exception as error:
        right = f"a function that cloudpickle can carry to the ranks; {error}"
        raise BadCase("step", name_of(request.step), right) from error
    timeout = min(request.collective_deadline, deadline / 2)
    acquired = warm_ranks().acquire(
        request.processes, request.lane, timeout, fresh, request.in_process, environment
    )
    with acquired as ranks:
        ranks.submit(message)
        yield ranks


def measure(
    ranks: RankSet, request: Request, reference: Reference, deadline: float, keep: bool
) -> Measurement:
    """Compare while gradients arrive: nothing is held but sums, unless ``keep``.

    Raises RankFailed or RanksTimedOut.
    """
    tolerance = Tolerance(reference.dtype, exact=request.case.exact)
    stream = Comparator(reference.expected, reference.described, tolerance)
    evidence: dict[int, Evidence] = {}
    measured: dict[int, dict[str, Tensor | None]] = {}
    for rank, result in ranks.collect(deadline):
        if isinstance(result, Evidence):
            evidence[rank] = result
            stream.begin(rank, result.gradients)
            if keep:
                measured[rank] = {}
            continue
        assert isinstance(result, list)
        for raw in result:
            assert isinstance(raw, RawChunk)
            chunk = raw.open()
            stream.add(rank, chunk)
            if keep:
                _keep(measured[rank], chunk.name, chunk.values)
    for rank, found in measured.items():
        for name, one in evidence[rank].gradients.items():
            value = found.get(name)
            if one is not None:
                found[name] = value.reshape(one.shape) if value is not None else None
    comparison = stream.finish({})
    if not comparison.same:  # by more than the least limits; what do they owe to rounding?
        comparison = stream.finish(reference.rounding.noise)
    return Measurement(
        comparison=comparison,
        evidence=dict(sorted(evidence.items())),  # ranks report as they come
        measured=measured,
        output={rank: ranks.output(rank) for rank in sorted(evidence)},
        changed=dict(sorted(ranks.changed.items())),
        left=_left(ranks) if ranks.changed else None,
    )


def _left(ranks: RankSet) -> RankFailed:
    ends = [
        ranks.end(rank, "changed", "; ".join(ranks.changed[rank]))
        if rank in ranks.changed
        else ranks.end(rank, "finished")
        for rank in range(ranks.layout.world_size)
    ]
    return attribution.failure(ends, "")


def _keep(kept: dict[str, Tensor | None], name: str, values: Tensor) -> None:
    before = kept.get(name)
    kept[name] = values if before is None else torch.cat([before, values])
