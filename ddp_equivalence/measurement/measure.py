"""Send a case to the ranks, and compare the gradients that they send back while they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.chunks import RawChunk
from ddp_equivalence.comparison.comparator import Comparator
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.comparison.expected import Expected
from ddp_equivalence.comparison.noise import larger_noise
from ddp_equivalence.comparison.tolerance import NARROW_MULTIPLE, Noise, Tolerance
from ddp_equivalence.measurement.on_rank import run
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.rounding_on_device import (
    may_be_that_of_a_device,
    rounding_on_device,
)
from ddp_equivalence.measurement.work import Evidence, Work
from ddp_equivalence.ranks import pickling, root_cause
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.idle_sets import Environment
from ddp_equivalence.ranks.probe import probe_ranks_once
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.user_modules import carried
from ddp_equivalence.ranks.warm_ranks import warm_ranks


@dataclass
class Measurement:
    """The comparison of the ranks' gradients, and everything else that came back from the ranks.

    ``measured``: rank -> the sampled elements of every gradient, flattened. ``output``: rank -> the
    text that it printed. ``changed``: rank -> phrases that say what the step changed in its process
    or left running there. ``changes_error``: an error that names these changes; None without any.
    ``outdated``: True if the step imported a module that the caller has changed, without a name in
    its code that told so. The ranks lacked that change. Now that it is known, it is sent.
    """

    comparison: Comparison
    evidence: Mapping[int, Evidence]
    measured: Mapping[int, Mapping[GradientKey, Tensor]]
    output: Mapping[int, str]
    changed: Mapping[int, tuple[str, ...]]
    changes_error: RankFailed | None
    outdated: bool


@contextmanager
def at_work(
    request: Request,
    deadline: float,
    fresh: bool,
    environment: Environment = (),
    look_for_float32: bool = False,
    observe: ElementSample[str] | None = None,
    log_operations: bool = False,
    order: tuple[int, ...] = (),
    log_draws: bool = False,
) -> Iterator[RankSet]:
    """Let ranks work on the request, until the end of the block.

    Raises BadCase if the step cannot be pickled, RankFailed if ranks cannot be started.
    """
    message = message_for(request, observe, look_for_float32, log_operations, order, log_draws)
    timeout = min(request.collective_deadline, deadline / 2)
    acquired = warm_ranks().acquire(
        request.processes, request.lane, timeout, fresh, request.in_process, environment
    )
    with acquired as ranks:
        ranks.submit(message)
        yield ranks


def message_for(
    request: Request,
    observe: ElementSample[str] | None = None,
    look_for_float32: bool = False,
    log_operations: bool = False,
    order: tuple[int, ...] = (),
    log_draws: bool = False,
) -> bytes:
    """The request as it is sent to the ranks. The other arguments: as in ``Work``.

    Raises BadCase if the step cannot be pickled.
    """
    work = replace(
        work_of(request),
        observe=observe,
        look_for_float32=look_for_float32,
        log_operations=log_operations,
        order=order,
        log_draws=log_draws,
    )
    try:
        return pickling.dumps(run, work)
    except BadCase:
        raise
    except Exception as error:
        right = f"a function that cloudpickle can carry to the ranks; {error}"
        raise BadCase("step", name_of(request.step), right) from error


def work_of(request: Request) -> Work:
    """The work of the ranks, without anything that is only looked at."""
    return Work(
        case=request.case,
        step=request.step,
        compare=request.compare,
        training=request.training,
        seeds=request.seeds,
        steps=request.steps,
        plant=request.plant,
        at_each_step=request.at_each_step,
        after_clipping=request.after_clipping,
        read_order=request.read_order,
    )


def measure(
    ranks: RankSet,
    request: Request,
    expected: Expected,
    deadline: float,
    sample: ElementSample[GradientKey],
) -> Measurement:
    """Compare the gradients while they arrive: only sums and sampled elements of them are kept.

    Raises RankFailed or RanksTimedOut.
    """
    tolerance = Tolerance(expected.reference.lowest_dtype, exact=request.case.exact)
    comparator = Comparator(expected.reference.expected, expected.described, tolerance)
    evidence: dict[int, Evidence] = {}
    kept: dict[int, dict[GradientKey, list[Tensor]]] = {}
    for rank, result in ranks.collect(deadline):
        if isinstance(result, Evidence):
            evidence[rank] = result
            comparator.begin(rank, result.gradients)
            kept[rank] = {}
            continue
        assert isinstance(result, list)
        for raw in result:
            assert isinstance(raw, RawChunk)
            chunk = raw.open()
            comparator.add(rank, chunk)
            if chunk.key in sample.sizes:
                elements = sample.of_chunk(chunk.key, chunk.offset, chunk.values)
                kept[rank].setdefault(chunk.key, []).append(elements)
    autocast = None  # it does nothing in float64
    if tolerance.dtype is not torch.float64:
        autocast = autocast_of(evidence)
    measurement = Measurement(
        comparison=finished(comparator, expected, tolerance, autocast),
        evidence=dict(sorted(evidence.items())),  # ranks report in any order
        measured={
            rank: {
                key: torch.cat(parts) if len(parts) > 1 else parts[0]
                for key, parts in of_rank.items()
            }
            for rank, of_rank in kept.items()
        },
        output={rank: ranks.output(rank) for rank in sorted(evidence)},
        changed=dict(sorted(ranks.changed.items())),
        changes_error=_changes_error(ranks) if ranks.changed else None,
        outdated=bool(ranks.not_compared) and carried.notice(ranks.not_compared),
    )
    if not measurement.outdated and may_be_that_of_a_device(measurement.comparison, request):
        on_device = None
        if not expected.rounding_under(autocast).order_matters:  # a device draws other numbers
            on_device = rounding_on_device(ranks, request, autocast, deadline)
        if on_device is not None:
            tolerance = replace(tolerance, measured_on=evidence[0].device)
            measurement.comparison = finished(
                comparator, expected, tolerance, autocast, on_device.noise
            )
    return measurement


def autocast_of(evidence: Mapping[int, Evidence]) -> torch.dtype | None:
    """The least precise dtype of an autocast region that a rank entered; None without any."""
    dtypes = {dtype for one in evidence.values() for _, dtype in one.autocast}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def finished(
    comparator: Comparator,
    expected: Expected,
    tolerance: Tolerance,
    autocast: torch.dtype | None,
    on_device: Mapping[GradientKey, Noise] | None = None,
) -> Comparison:
    """The comparison, with as much measuring of rounding as it takes to be sure.

    ``on_device``: the rounding on a device of the ranks, if it was measured in all runs.
    """
    comparison = comparator.finish({}, autocast)
    if comparison.same:
        return comparison
    # Something is beyond the least limit. Measure rounding and apply the limits that follow.
    rounding = expected.rounding_under(autocast)
    tolerance = replace(tolerance, inside=rounding.inside)
    comparison = comparator.finish(rounding.noise, autocast, tolerance)
    if on_device is None and not comparison.may_be_rounding and not comparison.has_useless_limits:
        return comparison
    noise = expected.rounding_of_more_runs(autocast).noise
    if on_device is not None:
        noise = larger_noise(noise, on_device)
    of_all_runs = replace(tolerance, all_runs=True)
    comparison = comparator.finish(noise, autocast, of_all_runs)
    if comparison.same and comparison.has_useless_limits:
        narrow = replace(of_all_runs, device_multiple=NARROW_MULTIPLE)
        narrowly = comparator.finish(noise, autocast, narrow)
        return narrowly if narrowly.same else comparison
    return comparison


def where_in_float32(request: Request) -> str:
    """Where the step computes in float32, on the first rank that does; "" if nowhere.

    The ranks run the step once more for this.
    """
    if request.in_process or not request.second_look:
        return ""
    with suppress(RankFailed):  # a step that cannot be looked into like this is judged without it
        with at_work(request, request.deadline, request.fresh, look_for_float32=True) as ranks:
            results = dict(ranks.collect(request.deadline))
        places = (results[rank].float32_at for rank in sorted(results))
        return next((place for place in places if place), "")
    return ""


def wrong_collectives(ranks: RankSet, request: Request) -> tuple[str, ...]:
    """The collectives of this backend that give wrong results. They are tried once in a run."""
    if ranks.broken or request.in_process or request.processes.world_size == 1:
        return ()
    try:
        results = probe_ranks_once(ranks, request.processes, request.lane)
    except RankFailed as error:
        return (f"the ranks failed when their collectives were tried: {error}",)
    return tuple(f"{result.collective}: {result.detail}" for result in results if result.wrong)


def _changes_error(ranks: RankSet) -> RankFailed:
    """The error for a step that has changed its process, with the end of every rank."""
    ends = [
        ranks.rank_end(rank, "changed", "; ".join(ranks.changed[rank]))
        if rank in ranks.changed
        else ranks.rank_end(rank, "finished")
        for rank in range(ranks.layout.world_size)
    ]
    return root_cause.failure(ends, "")
