"""check(): case and step in, verdict out; assert_equivalent() raises, once, at the edge."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.random_state import random_numbers_kept
from ddp_equivalence.case.shards import OWN, split
from ddp_equivalence.case.steps import Compare, Steps
from ddp_equivalence.diagnosis import vacuity
from ddp_equivalence.diagnosis.analysis import Surroundings, without_ranks
from ddp_equivalence.diagnosis.diagnose import diagnose
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.measured_view import first_wrong_step, repeats, taken_apart
from ddp_equivalence.faults.plant import intact
from ddp_equivalence.measurement.measure import (
    Measurement,
    at_work,
    measure,
    observe,
    wrong_collectives,
)
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.on_rank import Step
from ddp_equivalence.measurement.request import Request, read_request, repeat_line
from ddp_equivalence.measurement.rerun import second_look
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.ranks.threads import threads_beside, threads_for
from ddp_equivalence.reference import Reference, big_batch
from ddp_equivalence.report import listeners
from ddp_equivalence.report.errors import NotEquivalent, NothingCompared
from ddp_equivalence.report.verdict import Verdict


def check(
    case: Case,
    step: Step | str,
    *,
    compare: Compare = "gradients",
    lr: float = 0.1,
    steps: Steps = 1,
    backend: str | None = None,
    deadline: float | None = None,
    collective_deadline: float | None = None,
    fresh_ranks: bool | None = None,
    in_process: bool | None = None,
    allow_changes: bool | None = None,
) -> Verdict:
    """Compare what ``step`` leaves on every rank with one big batch.

    ``step``: (model, shard, rank) -> None or {name: tensor}; or a name of
    ``ddp_equivalence.strategies``. ``compare="gradients"`` calls it once for every big batch.
    ``compare="update"`` compares the change of the weights: a step of your own is called once, with
    the examples of all ``steps`` big batches joined, and leaves the trained weights in the model or
    returns them by name; the reference takes as many plain SGD steps with ``lr``.
    ``steps``: how many big batches the batch is read as, or the examples of each.
    ``backend``: "auto" (NCCL with a GPU for each rank, else gloo on the CPU), "gloo", "gloo_cuda",
    "nccl", "nccl2", "nccl-legacy". ``deadline``: seconds for the ranks' work;
    ``collective_deadline``: for one collective in it (half of that). ``fresh_ranks``: new processes
    for this check instead of warm ones. ``in_process``: rank 0 is this process, so that a debugger
    works in the step. ``allow_changes``: the step may change its process (seed, environment,
    default dtype, threads and processes left running) without failing the check; all is undone.

    Raises BadCase if the case or an argument cannot be right; never for what the step does.
    """
    request = read_request(
        case,
        step,
        compare,
        lr,
        steps,
        backend,
        deadline,
        collective_deadline,
        fresh_ranks,
        in_process,
        allow_changes,
    )
    started = time.monotonic()
    start_early()  # imports while the reference is computed
    with random_numbers_kept(), intact():
        verdict = _judge(request)
    verdict = replace(verdict, seconds=time.monotonic() - started, repeat=repeat_line(request))
    listeners.tell(verdict, request)
    return verdict


def assert_equivalent(
    case: Case,
    step: Step | str,
    *,
    compare: Compare = "gradients",
    lr: float = 0.1,
    steps: Steps = 1,
    backend: str | None = None,
    deadline: float | None = None,
    collective_deadline: float | None = None,
    fresh_ranks: bool | None = None,
    in_process: bool | None = None,
    allow_changes: bool | None = None,
) -> Verdict:
    """``check``, and raise if the outcome is not "same"; returns the verdict.

    Raises NotEquivalent if something differs, RankFailed or RanksTimedOut if ranks did not come
    back, NothingCompared if nothing was shown, BadCase as ``check`` does.
    """
    __tracebackhide__ = True
    verdict = check(
        case,
        step,
        compare=compare,
        lr=lr,
        steps=steps,
        backend=backend,
        deadline=deadline,
        collective_deadline=collective_deadline,
        fresh_ranks=fresh_ranks,
        in_process=in_process,
        allow_changes=allow_changes,
    )
    raise_unless_same(verdict)
    return verdict


def raise_unless_same(verdict: Verdict) -> None:
    """The edge: the one place where a verdict becomes an exception."""
    __tracebackhide__ = True
    if verdict.outcome == "different":
        raise NotEquivalent(verdict)
    if verdict.failure is not None:
        failure = verdict.failure
        raise type(failure)(str(verdict), failure.ends, failure.waiting)
    if verdict.outcome == "unknown":
        raise NothingCompared(verdict)


def _judge(request: Request) -> Verdict:
    verdict = Verdict(
        case=request.case,
        subject=name_of(request.step),
        promise=request.strategy.promise if request.strategy else "",
        lane=request.lane,
        outcome="unknown",
        compare=request.compare,
        lr=request.lr,
        planted=request.plant,
    )
    began = 0.0
    try:
        with at_work(request, request.deadline, request.fresh) as ranks:
            began = time.time()
            with threads_beside(request.processes.world_size):
                reference = _reference(request)  # while the ranks work
                reason = vacuity.against_the_reference(reference, request.compare)
            _check_deal(request, reference)
            around = Surroundings(request, reference)
            verdict = replace(verdict, examples=reference.examples, around=around)
            found = measure(ranks, request, reference, request.deadline, around.selection)
            observed: Mapping[int, Observation] = {}
            wrong: tuple[str, ...] = ()
            if not found.comparison.same:
                observed = observe(ranks, request, request.deadline, around.own_selection)
                wrong = wrong_collectives(ranks, request)
    except RankFailed as error:
        again = second_look(request, error, began) if began else None
        return replace(_failed(verdict, error), second_look=again)
    if reason is not None:
        return replace(verdict, reason=reason)
    verdict = replace(
        verdict,
        comparison=found.comparison,
        evidence=found.evidence,
        output=found.output,
        changed=found.changed,
        observed=observed,
    )
    world_size = request.processes.world_size
    reason = vacuity.against_the_evidence(found.evidence, request.strategy, world_size)
    reason = reason or vacuity.against_an_idle_plant(
        found.evidence, request.plant, request.processes
    )
    if reason is not None:
        return replace(verdict, reason=reason)
    if not found.comparison.same:
        step = first_wrong_step(found.comparison, request.step_count)
        if request.compare == "update":
            step = request.step_count - 1
        reason = vacuity.against_another_start(reference, found.evidence)
        reason = reason or vacuity.against_divergence(reference, step)
        if reason is not None:
            return replace(verdict, reason=reason)
        with threads_for(found.comparison.elements):
            return _blamed(_explained(verdict, found, request, around), wrong)
    reason = vacuity.against_a_pass(found.comparison, found.evidence, lambda: verdict.nearest)
    reason = reason or vacuity.against_a_hidden_plant(request.plant, request.processes)
    may_change = request.allow_changes or request.in_process
    if reason is None and found.left is not None and not may_change:
        return _failed(verdict, found.left)
    return replace(verdict, reason=reason or "", outcome="unknown" if reason else "same")


def _failed(verdict: Verdict, error: RankFailed) -> Verdict:
    """The ranks' failure is no verdict on the step."""
    reason = "ranks timed out" if isinstance(error, RanksTimedOut) else "a rank failed"
    if error.ends and error.ends[0].kind == "changed":
        reason = "the step leaves more behind than gradients"
    output = {end.rank: end.output for end in error.ends}
    return replace(verdict, reason=reason, failure=error, output=output)


def _explained(
    verdict: Verdict, found: Measurement, request: Request, around: Surroundings
) -> Verdict:
    """Name the cause, if one of the known explanations fits."""
    comparison = found.comparison
    repeated = repeats(found.measured, verdict.observed) if around.selection.is_whole else None
    verdict = replace(verdict, outcome="different", repeated=repeated)
    if comparison.structure:
        why = "gradients that are missing or of another shape cannot be fitted"
        return replace(verdict, no_view=why)
    step = first_wrong_step(comparison, request.step_count)
    view = around.view_of_step(step)
    if view is None:
        why = "after the first step the weights of a wrong run are its own"
        return replace(
            verdict, no_view=why, _of_weights=around.left_over_of_weights(found.measured)
        )
    view = taken_apart(view, found, verdict.observed, step, request.step_count, repeated is False)
    findings = diagnose(view, comparison)
    first = findings[0] if findings else None
    return replace(
        verdict,
        cause=first.cause if first is not None and first.accepted else None,
        findings=findings,
        view=view,
    )


def _blamed(verdict: Verdict, wrong: tuple[str, ...]) -> Verdict:
    """Collectives that answer wrongly come before anything that a step may have done."""
    if not wrong:
        return verdict
    others = tuple(replace(one, accepted=False) for one in verdict.findings)
    first = Finding(
        cause="collective_wrong",
        sentence="The collectives themselves give wrong answers here, whatever the step does.",
        look_at="the backend and its library, before the step: ddp-equivalence doctor asks them",
        unexplained=None,
        accepted=True,
        fits=True,
        because="; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""),
    )
    return replace(verdict, cause=first.cause, findings=(first, *others))


def _check_deal(request: Request, reference: Reference) -> None:
    """Raises BadCase if the examples cannot be dealt as the case says."""
    case = request.case
    for examples in reference.examples if case.shards != OWN else ():
        split(case.shards, examples, case.ranks.world_size)


def _reference(request: Request) -> Reference:
    case = request.case
    if not case.is_catalogue:
        return big_batch(case, request.compare, request.lr, request.steps)
    return _catalogue_reference(without_ranks(case), request.compare, request.lr, request.steps)


@lru_cache(maxsize=128)
def _catalogue_reference(case: Case, compare: Compare, lr: float, steps: Steps) -> Reference:
    return big_batch(case, compare, lr, steps)
