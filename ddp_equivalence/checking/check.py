"""``check`` returns a verdict on a step. ``assert_equivalent`` raises unless it is "same".

This is the whole flow on one page: the ranks run the step, this process computes the reference
meanwhile, the gradients are compared while they arrive, ``vacuity`` asks whether the comparison
could have failed, and a difference is explained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Unpack

from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.random_state import restored_random_state
from ddp_equivalence.checking.judged_again import (
    judged_again,
    judged_by_steps,
    judged_on_fresh_ranks,
    unless_right_in_own_precision,
    will_be_judged_by_steps,
)
from ddp_equivalence.checking.large_models import BigBatch
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.diagnosis import vacuity
from ddp_equivalence.diagnosis.analysis import Analysis
from ddp_equivalence.diagnosis.diagnose import finding_of_wrong_collectives
from ddp_equivalence.diagnosis.draws import right_but_for_draws
from ddp_equivalence.diagnosis.state import (
    BufferBeside,
    against_a_race,
    finding_of_state,
    no_optimizer_step,
    state_that_matters,
    with_race,
)
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.diagnosis.unknown import Unknown
from ddp_equivalence.diagnosis.vacuity import against_idle_data_parallel, against_shared_gpus
from ddp_equivalence.diagnosis.view import check_shards
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.measure import (
    Measurement,
    SecondRun,
    at_work,
    measure,
    observe,
    observe_on_fresh_ranks,
    rerun,
    wrong_collectives,
)
from ddp_equivalence.measurement.request import (
    CheckOptions,
    Request,
    read_request,
    repeat_line,
    subject_named,
)
from ddp_equivalence.measurement.work import Step
from ddp_equivalence.ranks.deadlines import (
    one_at_a_time,
    threads_for,
    use_one_thread_in_a_fork,
)
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.report.blocks import defined_at
from ddp_equivalence.report.record import begin, tell
from ddp_equivalence.report.verdict import (
    Asked,
    NotEquivalent,
    NothingCompared,
    Verdict,
    failed,
    unknown,
)


def check(case: Case, step: Step | str, **options: Unpack[CheckOptions]) -> Verdict:
    """Compare what ``step`` leaves on every rank with one big batch.

    ``step``: (model, shard, rank) -> None or {name: tensor}; or (model, rank) -> such a function of
    the shard, which is made once and called for every big batch; or the name of a strategy in
    ``ddp_equivalence.strategies``. ``options``: ``compare``, ``lr``, ``optimizer``, ``clip``,
    ``reference``, ``seeds``, ``steps``, ``backend``, ``deadline``, ``collective_deadline``,
    ``fresh_ranks``, ``in_process``, ``allow_changes``;
    ``ddp_equivalence.measurement.request.CheckOptions`` says what each of them does.

    Raises BadCase if the case or an option cannot be right. What the step does wrong is reported in
    the verdict, and raises nothing.
    """
    with subject_named(step):
        request = read_request(case, step, options)
        with one_at_a_time(), restored_random_state(), without_planted_faults():
            started = time.monotonic()
            use_one_thread_in_a_fork()
            start_early()  # the server of ranks imports torch while the reference is computed
            verdict = judged_on_fresh_ranks(_judge_trainer(request), request, _judge_trainer)
            if verdict.again.on_used_ranks is not None:
                request = replace(request, fresh=True)
            verdict = judged_again(verdict, request, _judge)
    verdict = replace(verdict, seconds=time.monotonic() - started, repeat=repeat_line(request))
    tell(verdict, request)
    begin(verdict)
    return verdict


def assert_equivalent(case: Case, step: Step | str, **options: Unpack[CheckOptions]) -> Verdict:
    """Run ``check``, and return its verdict if the outcome is "same".

    Raises NotEquivalent if something differs, RankFailed if a rank failed or the step changed
    its process, RanksTimedOut if ranks did not finish in time, NothingCompared if the comparison
    showed nothing, and BadCase as ``check`` does.
    """
    __tracebackhide__ = True
    verdict = check(case, step, **options)
    raise_unless_same(verdict)
    return verdict


def raise_unless_same(verdict: Verdict) -> None:
    """The one place where a verdict becomes an exception."""
    __tracebackhide__ = True
    if verdict.outcome == "different":
        raise NotEquivalent(verdict)
    if verdict.failure is not None:
        failure = verdict.failure
        raise type(failure)(str(verdict), failure.ends, failure.waiting)
    if verdict.outcome == "unknown":
        raise NothingCompared(verdict)


def _judge(request: Request) -> Verdict:
    """Measure, compare, and decide between same, different and unknown."""
    known, big_batch = _known_before(request), BigBatch(request)
    started, began = time.monotonic(), 0.0
    wrong, second = tuple[str, ...](), SecondRun()
    try:
        with (
            big_batch.prepared(),
            at_work(request, request.deadline, request.fresh, message=big_batch.message) as ranks,
        ):
            began = time.time()
            expected, analysis = _computed(request, big_batch)
            why_unknown = vacuity.against_the_reference(expected.reference)
            known = partial(known, examples=expected.reference.examples, analysis=analysis)
            measurement = measure(ranks, request, expected, request.deadline, analysis.sample)
            state = state_that_matters(expected, measurement)
            if state or not (measurement.outdated or measurement.comparison.same):
                watched = request.deadline, analysis.sample_of_step(0), bool(analysis.draws)
                second = observe(ranks, request, *watched)
                wrong = wrong_collectives(ranks, request)
        if second.needs_fresh_ranks:
            second = observe_on_fresh_ranks(request, *watched)
        analysis.observed, analysis.why_not_watched = second.by_rank, second.why_not
        if not request.in_process:  # where the user may have stopped in a debugger
            analysis.time = TimeLeft.since(started, request.deadline)
    except RankFailed as error:
        return _failed_or_again(known(), request, error, began)
    again = request if measurement.outdated else _after_clipping(request, measurement)
    if again is not None:
        return _judge(again)
    if why_unknown is not None:
        return unknown(known(), why_unknown)
    verdict = known(
        comparison=measurement.comparison,
        evidence=measurement.evidence,
        output=measurement.output,
        changed=measurement.changed,
        observed=analysis.observed,
        why_not_watched=second.why_not,
    )
    evidence, world_size = measurement.evidence, request.processes.world_size
    why_unknown = (
        vacuity.against_the_evidence(evidence, request.strategy, world_size, analysis.observed)
        or vacuity.against_another_batch(expected.data, evidence)
        or against_shared_gpus(request.lane, evidence)
        or vacuity.against_an_idle_plant(evidence, request.plant, request.processes)
    )
    if why_unknown is not None:
        return unknown(verdict, why_unknown)
    if measurement.comparison.same:
        return _same_if_shown(verdict, measurement, request, state)
    verdict = unless_right_in_own_precision(verdict, request, _judge)
    if verdict.outcome == "same":
        return verdict
    analysis.measurement = measurement
    right = right_but_for_draws(request, analysis.drawn, measurement.comparison)
    if right is not None and not (state or wrong):
        measurement = replace(measurement, comparison=right)
        return _same_if_shown(replace(verdict, comparison=right), measurement, request, state)
    return _different_if_comparable(verdict, analysis, request, wrong)


def _computed(request: Request, big_batch: BigBatch) -> tuple[Expected, Analysis]:
    """The big batch, which is told to ranks that compare their own gradients."""
    expected = big_batch.expected()
    check_shards(request, expected.reference)
    analysis = Analysis(request, expected)
    big_batch.tell_ranks(expected, analysis.sample)
    return expected, analysis


def _after_clipping(request: Request, measurement: Measurement) -> Request | None:
    """The request to compare gradients after clipping, if the ranks clip them differently: as they
    were before, they could be right on all ranks. None if they do not.
    """
    alike = len({one.clips for one in measurement.evidence.values()}) == 1
    if alike or request.after_clipping or request.trains:
        return None
    return replace(request, after_clipping=True)


def _judge_trainer(request: Request) -> Verdict:
    return judged_by_steps(_judge(request), request, _judge)


def _known_before(request: Request) -> partial[Verdict]:
    """Makes verdicts with everything that is known before the ranks have run."""
    return partial(
        Verdict,
        case=request.case,
        subject=name_of(request.step),
        lane=request.lane,
        asked=Asked(
            promise=request.strategy.promise if request.strategy else "",
            compare=request.compare,
            training=request.training,
            planted=request.plant,
            defined_at=defined_at(request.step),
        ),
    )


def _failed_or_again(
    verdict: Verdict, request: Request, error: RankFailed, began: float
) -> Verdict:
    """Ranks failed: judge again if they lacked what idle ranks have held on their GPUs."""
    if error.may_pass_now:
        return _judge(request)
    again = rerun(request, error, began) if began else None
    return replace(failed(verdict, error), second_look=again)


def _same_if_shown(
    verdict: Verdict, measurement: Measurement, request: Request, state: Sequence[BufferBeside]
) -> Verdict:
    """Nothing differs. That is a pass only if a difference could have shown, and if the ``state``
    that is left gives the next step no other gradient.
    """
    comparison, evidence = measurement.comparison, measurement.evidence
    why_unknown = (
        _unless_it_is_built_alike(request, verdict)
        or against_idle_data_parallel(evidence)
        or vacuity.against_a_pass(comparison, evidence, lambda: verdict.nearest)
        or vacuity.against_a_hidden_plant(request.plant, request.processes)
    )
    if why_unknown is not None:
        return unknown(verdict, why_unknown)
    if measurement.changes_error is not None and not (request.allow_changes or request.in_process):
        return failed(verdict, measurement.changes_error)
    race = against_a_race(evidence, comparison)
    if race is not None:
        return unknown(verdict, race)
    if state:
        finding = finding_of_state(state, evidence, verdict.observed)
        return replace(verdict, outcome="different", cause=finding.cause, findings=(finding,))
    return replace(verdict, outcome="same")


def _unless_it_is_built_alike(request: Request, verdict: Verdict) -> Unknown | None:
    """A model of the user's may be another one at each call."""
    if request.case.is_catalogue or verdict.analysis is None:
        return None
    with suppress(BadCase):  # it is the same instance, which only a further check refuses
        analysis = verdict.analysis
        return vacuity.against_another_start(analysis.reference, verdict.evidence, analysis.start)
    return None


def _different_if_comparable(
    verdict: Verdict, analysis: Analysis, request: Request, wrong: tuple[str, ...]
) -> Verdict:
    """Something differs: name the cause, if one of the known explanations fits.

    ``wrong``: the wrong answers that collectives give on this machine, whatever the step does.
    """
    reference = analysis.reference
    why_unknown = vacuity.against_another_start(
        reference, verdict.evidence
    ) or vacuity.against_divergence(reference, analysis.first_wrong_step)
    if why_unknown is not None:
        return unknown(verdict, why_unknown)
    if not request.explains:
        return replace(verdict, outcome="different")
    comparison, evidence = verdict.comparison, verdict.evidence
    assert comparison is not None
    with threads_for(comparison.elements):
        raced = with_race((), evidence, comparison)
        idle = no_optimizer_step(request, comparison, evidence, verdict.observed)
        is_known = wrong or raced or idle or will_be_judged_by_steps(request, verdict)
        analysis.looks_further = not is_known
        findings = with_race(analysis.findings, evidence, comparison)
        repeated = analysis.repeated
        _ = analysis.beside, analysis.repairs  # a report runs no step any more
    seen = finding_of_wrong_collectives(wrong) if wrong else idle
    if seen is not None:
        findings = (seen, *(replace(finding, accepted=False) for finding in findings))
    best = findings[0] if findings else None
    return replace(
        verdict,
        outcome="different",
        cause=best.cause if best is not None and best.accepted else None,
        findings=findings,
        repeated=repeated,
    )
