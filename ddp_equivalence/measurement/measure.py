"""Sends a case to the ranks, compares the gradients that come back, and watches a second run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ddp_equivalence.case.build import build_batches
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.memory import give_back_memory
from ddp_equivalence.case.shards import OWN
from ddp_equivalence.case.training import Compare, GradientKey, Steps, Training
from ddp_equivalence.comparison.chunks import RawChunk
from ddp_equivalence.comparison.comparison import LARGE, Comparator, Comparison
from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.comparison.rounding import (
    Expected,
    Rounding,
    larger_noise,
    measure_more,
    measure_rounding,
)
from ddp_equivalence.comparison.shared import ComparedHere, kept_of
from ddp_equivalence.comparison.tolerance import NARROW_MULTIPLE, USELESS, Noise, Tolerance
from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.on_rank import run
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.work import Evidence, Work
from ddp_equivalence.ranks import messages, pickling, user_modules
from ddp_equivalence.ranks.environment import RERUN_VARIABLE
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
from ddp_equivalence.ranks.probe import probe_ranks_once
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.warm_ranks import Environment, warm_ranks
from ddp_equivalence.reference import big_batch


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
    output: Mapping[int, str] = field(default_factory=dict)
    changed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    changes_error: RankFailed | None = None
    outdated: bool = False


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
    message: bytes = b"",
) -> Iterator[RankSet]:
    """Let ranks work on the request, until the end of the block. ``message``: the request as it is
    sent, if it has been made already.

    Raises BadCase if the step cannot be pickled, RankFailed if ranks cannot be started.
    """
    message = message or message_for(
        request, observe, look_for_float32, log_operations, order, log_draws
    )
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
    truth: str = "",
    compared_from: int = 0,
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
        truth=truth,
        compared_from=compared_from,
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
    right, owned = expected.reference.expected, request.judges_gradients_at_each_step
    comparator = Comparator(right, expected.described, tolerance, owned=owned)
    evidence, kept = _collected(ranks, comparator, deadline, sample)
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
        outdated=bool(ranks.not_compared) and user_modules.notice(ranks.not_compared),
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


def _collected(
    ranks: RankSet, comparator: Comparator, deadline: float, sample: ElementSample[GradientKey]
) -> tuple[dict[int, Evidence], dict[int, dict[GradientKey, list[Tensor]]]]:
    """The evidence of every rank, and the sampled elements of its gradients, in parts."""
    evidence: dict[int, Evidence] = {}
    kept: dict[int, dict[GradientKey, list[Tensor]]] = {}
    here: dict[int, ComparedHere] = {}
    for rank, result in ranks.collect(deadline):
        if isinstance(result, Evidence):
            evidence[rank] = result
            comparator.begin(rank, result.gradients)
            kept[rank] = {}
            continue
        if isinstance(result, ComparedHere):
            here[rank] = result
            continue
        assert isinstance(result, list)
        for raw in result:
            assert isinstance(raw, RawChunk)
            chunk = raw.open()
            comparator.add(rank, chunk)
            if chunk.key in sample.sizes:
                elements = sample.of_chunk(chunk.key, chunk.offset, chunk.values)
                kept[rank].setdefault(chunk.key, []).append(elements)
    comparator.take(here)
    for rank, of_rank in here.items():
        kept[rank] = {
            key: [kept_of(here, rank, key, sample.size(key))]
            for key in of_rank.sums
            if key in sample.sizes
        }
    return evidence, kept


def autocast_of(evidence: Mapping[int, Evidence]) -> torch.dtype | None:
    """The least precise dtype of an autocast region that a rank entered; None without any."""
    return least_precise(dtype for one in evidence.values() for _, dtype in one.autocast)


def least_precise(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The least precise of these dtypes; None without any."""
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
    if comparison.same or comparison.is_a_whole_multiple:
        return comparison
    # Something is beyond the least limit. Measure rounding and apply the limits that follow.
    if comparison.elements >= LARGE and tolerance.dtype is not torch.float64:
        # A run of the big batch takes long, and the others can only widen the limits of the first.
        at_once = comparator.finish(expected.noise_of_one_run(autocast), autocast)
        if at_once.same and not at_once.has_useless_limits:
            return at_once
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
    return messages.failure(ends, "")


# Runs a step that differs a second time, and watches it.


@dataclass(frozen=True)
class SecondRun:
    """The observations of each rank while the step ran a second time.

    ``why_not``: why there was no second run. ``needs_fresh_ranks``: the first run has left ranks
    that can do no more work.
    """

    by_rank: Mapping[int, Observation] = field(default_factory=dict)
    why_not: str = ""
    needs_fresh_ranks: bool = False


ONE_LOOK = "each step runs once here (--explore, --ddp-no-second-look or second_look=False)"


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
        return SecondRun(why_not=ONE_LOOK)
    if ranks.broken:
        return SecondRun(needs_fresh_ranks=True)
    give_back_memory(sum(sample.sizes.values()))  # which the ranks need now
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


# Runs a case whose ranks hung or were aborted once more, with torch's detailed checks on.

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


# Runs a step on its ranks and on one rank alone, and records the operations of both.


@dataclass(frozen=True)
class OneRank:
    """The operations of a step ``by_rank``, and those of the same step on ``alone``: one rank that
    is given the whole batch. ``owned``: a gradient may be on some ranks only, as where each has the
    optimizer of its own parameters.
    """

    by_rank: Mapping[int, Operations]
    alone: Operations
    owned: bool = False


def operations_beside_one_rank(
    request: Request, deadline: float, order: tuple[int, ...] = ()
) -> OneRank | None:
    """Run the step twice more: on its ranks, and on one rank with the whole batch in this order.
    If it has only one rank, it runs once.

    None if the step cannot run on one rank, or if there is too much to record. ``deadline``:
    seconds for each of the two runs.
    """
    has_one = request.processes.world_size == 1
    alone = None if has_one else operations_on_one_rank(request, deadline, order)
    if alone is None and not has_one:
        return None
    by_rank = operations_on_ranks(request, deadline)
    return None if by_rank is None else OneRank(by_rank, alone or by_rank[0], request.at_each_step)


def operations_on_ranks(request: Request, deadline: float) -> dict[int, Operations] | None:
    """Run the step once more, on its ranks; None if there is too much to record."""
    if request.in_process or not request.second_look:
        return None
    try:
        by_rank = _operations(request, deadline)
    except (RankFailed, BadCase):
        return None
    complete = [one.complete for one in by_rank.values()]
    return by_rank if all(complete) and len(complete) == request.processes.world_size else None


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


# How far rounding moves the big batch on one device of the kind that the ranks compute on.
#
# The reference and its rounding are computed on the CPU. A GPU has other kernels, which round
# differently: they add up in another order, and may compute products in a lower precision. Where
# a difference lies beyond the limits of the CPU, and may be the rounding of a GPU, rank 0
# computes the big batch on its own device, as ``comparison.rounding`` does on the CPU.


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
        ranks.submit(pickling.dumps(rounding_on_rank, work))
        rounding: Rounding | None = dict(ranks.collect(deadline)).get(0)
        return rounding
    return None


def rounding_on_rank(rank: Rank, work: RoundingWork) -> Iterator[Rounding | None]:
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
