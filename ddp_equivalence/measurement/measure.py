"""Send a case to the ranks and compare what they send back while it arrives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.comparison.chunks import RawChunk
from ddp_equivalence.comparison.comparison import Comparator, Comparison
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.comparison.tolerance import Tolerance
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.on_rank import Evidence, Work, run
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks import pickling, root_cause
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.probe import probe_ranks_once
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.warm_ranks import Environment, warm_ranks
from ddp_equivalence.reference import Reference


@dataclass
class Measurement:
    """What came back from the ranks.

    ``measured``: of the gradients themselves what was selected, flattened. ``output``: what each
    rank printed. ``changed``: rank -> what its process was left with, as phrases; ``left``: the
    same as an error with an entry for every rank.
    """

    comparison: Comparison
    evidence: Mapping[int, Evidence]
    measured: Mapping[int, Mapping[str, Tensor | None]]
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
    message = _message(request)
    timeout = min(request.collective_deadline, deadline / 2)
    acquired = warm_ranks().acquire(
        request.processes, request.lane, timeout, fresh, request.in_process, environment
    )
    with acquired as ranks:
        ranks.submit(message)
        yield ranks


def _message(request: Request, observe: ElementSample | None = None) -> bytes:
    work = Work(
        case=request.case,
        step=request.step,
        compare=request.compare,
        lr=request.lr,
        steps=request.steps,
        plant=request.plant,
        observe=observe,
    )
    try:
        return pickling.dumps(run, work)
    except Exception as error:
        right = f"a function that cloudpickle can carry to the ranks; {error}"
        raise BadCase("step", name_of(request.step), right) from error


def measure(
    ranks: RankSet,
    request: Request,
    reference: Reference,
    deadline: float,
    selection: ElementSample,
) -> Measurement:
    """Compare while gradients arrive: nothing is held but sums and what is selected.

    Raises RankFailed or RanksTimedOut.
    """
    tolerance = Tolerance(reference.dtype, exact=request.case.exact)
    stream = Comparator(reference.expected, reference.described, tolerance)
    evidence: dict[int, Evidence] = {}
    kept: dict[int, dict[str, list[Tensor]]] = {}
    for rank, result in ranks.collect(deadline):
        if isinstance(result, Evidence):
            evidence[rank] = result
            stream.begin(rank, result.gradients)
            kept[rank] = {}
            continue
        assert isinstance(result, list)
        for raw in result:
            assert isinstance(raw, RawChunk)
            chunk = raw.open()
            stream.add(rank, chunk)
            if chunk.name in selection.sizes:
                kept[rank].setdefault(chunk.name, []).append(selection.of_chunk(chunk))
    comparison = stream.finish({})
    if not comparison.same:  # by more than the least limits; what do they owe to rounding?
        comparison = stream.finish(reference.rounding.noise)
    return Measurement(
        comparison=comparison,
        evidence=dict(sorted(evidence.items())),  # ranks report as they come
        measured={
            rank: {name: torch.cat(values) for name, values in found.items()}
            for rank, found in kept.items()
        },
        output={rank: ranks.output(rank) for rank in sorted(evidence)},
        changed=dict(sorted(ranks.changed.items())),
        left=_left(ranks) if ranks.changed else None,
    )


def observe(
    ranks: RankSet, request: Request, deadline: float, selection: ElementSample
) -> dict[int, Observation]:
    """Run the same step once more, watched closely: rank -> what was seen, all ranks or none."""
    if ranks.broken or request.in_process or not request.second_look:
        return {}  # no ranks to run it on, or somebody is looking already
    found = {}
    try:
        ranks.submit(_message(request, selection))
        for rank, result in ranks.collect(deadline):
            if isinstance(result, Evidence) and result.observed is not None:
                found[rank] = result.observed
    except RankFailed:
        return {}  # the first run's word stands without evidence
    return dict(sorted(found.items()))


def wrong_collectives(ranks: RankSet, request: Request) -> tuple[str, ...]:
    """What the collectives of this backend answer wrongly; asked once in a run."""
    if ranks.broken or request.in_process or request.processes.world_size == 1:
        return ()
    try:
        results = probe_ranks_once(ranks, request.processes, request.lane)
    except RankFailed as error:
        return (f"the ranks failed when their collectives were asked: {error}",)
    return tuple(f"{result.collective}: {result.detail}" for result in results if result.wrong)


def _left(ranks: RankSet) -> RankFailed:
    ends = [
        ranks.rank_end(rank, "changed", "; ".join(ranks.changed[rank]))
        if rank in ranks.changed
        else ranks.rank_end(rank, "finished")
        for rank in range(ranks.layout.world_size)
    ]
    return root_cause.failure(ends, "")
