"""Compares what every rank held at one step with what the script computes in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.diagnosis import vacuity
from ddp_equivalence.diagnosis.causes import clipped_while_scaled
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.observed_scripts.analysis_of_script import AnalysisOfScript
from ddp_equivalence.observed_scripts.as_case import (
    BEFORE_CLIP,
    HELD,
    Kind,
    ObservedStep,
    as_case,
)
from ddp_equivalence.observed_scripts.beside_one_process import with_one_process
from ddp_equivalence.observed_scripts.coupled_rows import rows_depend_on_each_other
from ddp_equivalence.observed_scripts.differences_between_ranks import (
    other_optimizers_step,
    tensors_differ_between_ranks,
)
from ddp_equivalence.observed_scripts.limited_by_hooks import limited_by_hooks
from ddp_equivalence.observed_scripts.looked_at_closer import SecondRun
from ddp_equivalence.observed_scripts.measured_step import (
    Script,
    layout_of,
    measured,
    request_of,
)
from ddp_equivalence.observed_scripts.not_comparable import (
    against_an_idle_plant,
    against_the_names,
    draws_by_rank,
    draws_otherwise,
    padded_by_guess,
    reads_otherwise,
    unfaithful,
)
from ddp_equivalence.observed_scripts.observations import observations
from ddp_equivalence.observed_scripts.query import RowOrder
from ddp_equivalence.observed_scripts.reduced_after_clipping import reduces_after_clipping
from ddp_equivalence.observed_scripts.rounding_of_script import ExpectedOfScript
from ddp_equivalence.observed_scripts.running_script import TOO_SLOW
from ddp_equivalence.observed_scripts.seen_without_reference import (
    SAME_DATA,
    clipped_otherwise,
    faults_seen,
    micro_batches_added_up,
    stale_gradients,
)
from ddp_equivalence.observed_scripts.state_moved import with_state_of_one_process
from ddp_equivalence.reference import big_batch
from ddp_equivalence.report.render import render, render_full
from ddp_equivalence.report.unknown_verdicts import unknown
from ddp_equivalence.report.verdict import Verdict

OTHER_ROW_ORDERS: tuple[RowOrder, ...] = ("in blocks", "in dim 1")
NO_ROWS: RowOrder = "no rows"

EPOCHS_TAKE = 4
"""So many times as long may be spent on a step for which every question takes an epoch."""

LookCloser = Callable[[ObservedStep, Verdict], SecondRun]
"""What is seen of the ranks when they run again and are watched; empty if they cannot be."""


def judge(script: Script, step: ObservedStep, look_closer: LookCloser | None) -> Verdict:
    """The verdict on one step: of the gradients before clipping, unless they are reduced after it,
    then of those that are stepped with. ``look_closer``: used if something differs; None if
    differences are not explained.
    """
    kind = HELD if reduces_after_clipping(step) else BEFORE_CLIP
    if step.before is not None and (parted := tuple(other_optimizers_step(step))):
        last = _compared(script, step.before, kind)
        if last.comparison is not None:
            subject = f"{script.name}, after step {step.number} of {script.steps}"
            last = replace(last, subject=subject, outcome="different", analysis=None)
            return replace(last, cause=parted[0].cause, findings=parted)
    verdict = _with_draws_in_order(script, step, kind)
    if (why := against_an_idle_plant(step)) is not None:
        return unknown(verdict, why)
    faults = tuple(faults_seen(step))
    records = [step.record.step(rank, step.number) for rank in range(step.record.world_size)]
    if verdict.outcome == "different" and not faults:
        guessed = padded_by_guess(step)
        verdict = verdict if guessed is None else unknown(verdict, guessed)
    if verdict.outcome == "same" and kind != HELD and any(one.clips for one in records):
        clipped = _compared(script, step, HELD)
        if clipped.outcome == "different":
            seen_scaled = any(one.cause == clipped_while_scaled.NAME for one in faults)
            otherwise = () if seen_scaled else (clipped_otherwise(step),)
            verdict, faults = clipped, (*otherwise, *faults)
    if verdict.outcome == "same":
        verdict = with_state_of_one_process(step, verdict, partial(_compared, script, kind=kind))
    elif verdict.outcome == "different" and look_closer is not None:
        verdict = _explained(step, verdict, look_closer)
    return _with_faults(verdict, faults)


def _with_draws_in_order(script: Script, step: ObservedStep, kind: Kind) -> Verdict:
    """The verdict, where one process draws for the rows in the order that the script really has.

    It does not, if another order of the rows gives another gradient. Then other ways are tried.
    Where all ranks draw the same, their numbers may also belong to no row.
    """
    verdict = _compared(script, step, kind)
    oracle, ranks = step.oracle, range(step.record.world_size)
    draws = any(step.record.step(rank, step.number).draws for rank in ranks)
    if oracle is None or not draws or verdict.outcome != "different":
        return verdict
    usual, missed, alike = oracle.row_order, oracle.missed, oracle.alike
    others = OTHER_ROW_ORDERS if order_matters(verdict) or missed else ()
    if step.record.ranks_draw_alike(step.number):
        others = (*others, NO_ROWS)  # exchanging ranks does not show it
    for row_order in others if usual == "by row" else ():
        oracle.row_order, oracle.missed, oracle.alike = row_order, {}, {}
        other = _compared(script, step, kind)
        is_this = order_matters(verdict) and not order_matters(other) and not oracle.missed
        if other.outcome == "same" or (is_this and other.outcome == "different"):
            return other
    oracle.row_order, oracle.missed, oracle.alike = usual, missed, alike
    return verdict


def rows_may_be_elsewhere(verdicts: Iterable[Verdict]) -> bool:
    """True if what was taken for rows may be none, such as the steps of a sequence: another order
    of them gives other gradients, or they cannot be joined.
    """
    cannot = [one for one in verdicts if one.unknown_because is UnknownBecause.CANNOT_REPLAY]
    return any(map(order_matters, verdicts)) or any(
        not one.reason.startswith(TOO_SLOW) for one in cannot
    )


def order_matters(verdict: Verdict) -> bool:
    """True if another order of the rows gives other gradients."""
    analysis = verdict.analysis
    return isinstance(analysis, AnalysisOfScript) and (
        verdict.outcome == "different" and analysis.order_matters
    )


def _with_faults(verdict: Verdict, faults: tuple[Finding, ...]) -> Verdict:
    """The verdict with what was seen to be wrong without a comparison, if that says more."""
    if not faults:
        return verdict
    first = faults[0]
    says_more = (
        verdict.outcome == "same"
        or first.cause == SAME_DATA  # then other causes cannot be told apart
        or verdict.cause in (None, "weights_differ_between_ranks")
        or first.cause == verdict.cause
    )
    if verdict.outcome == "unknown":
        identical = verdict.unknown_because is UnknownBecause.IDENTICAL_INPUTS
        says_more = identical and first.cause == SAME_DATA
    if not says_more or (first.cause == verdict.cause and verdict.findings[0].lines):
        return verdict
    others = [one for one in verdict.findings if one.cause != first.cause]
    findings = (first, *(replace(one, accepted=False) for one in others))
    return replace(verdict, outcome="different", cause=first.cause, findings=findings, reason="")


def _compared(script: Script, step: ObservedStep, kind: Kind) -> Verdict:
    """Same, different or unknown, before any cause is looked for."""
    case = as_case(step, kind, layout_of(step))
    request = request_of(script, case)
    verdict = Verdict(
        case=case,
        subject=_subject(script, step),
        repeat=script.repeat,
        promise="",
        lane=script.lane,
        of_script=True,
        outcome="unknown",
        render=render,
        render_full=render_full,
    )
    if (why := against_the_names(step)) is not None:
        return unknown(verdict, why)
    try:
        reference = big_batch(case)
    except BadCase as error:
        why = Unknown(UnknownBecause.CANNOT_REPLAY, str(error.__cause__ or error))
        return unknown(verdict, why)
    if not script.float64 or reference.lowest_dtype is not torch.float64:
        reference = replace(reference, why_not_float64="the script computes in a lower precision")
    verdict = replace(verdict, examples=reference.examples)
    if (why := vacuity.against_the_reference(reference)) is not None:
        return unknown(verdict, why)
    expected = ExpectedOfScript(reference, step, kind)
    analysis = AnalysisOfScript(request, expected, kind)
    slow = step.record.is_cut_short(step.group)
    seconds = script.seconds * (EPOCHS_TAKE if slow else 1)
    analysis.time = TimeLeft(seconds, seconds)
    measurement = measured(step, kind, expected, analysis.sample)
    comparison, evidence = measurement.comparison, measurement.evidence
    verdict = replace(verdict, comparison=comparison, evidence=evidence, analysis=analysis)
    if comparison.same:
        why = vacuity.against_a_pass(comparison, evidence, lambda: verdict.nearest)
        return replace(verdict, outcome="same") if why is None else unknown(verdict, why)
    analysis.measurement = measurement
    return replace(verdict, outcome="different")


def _explained(step: ObservedStep, verdict: Verdict, look_closer: LookCloser) -> Verdict:
    """The difference with its cause, if one of the known explanations fits."""
    analysis = verdict.analysis
    assert isinstance(analysis, AnalysisOfScript)
    if (why := reads_otherwise(step)) is not None:
        return unknown(verdict, why)
    second = look_closer(step, verdict)
    if not second.observations:
        held = {r: step.gradients(r, analysis.kind) for r in range(step.record.world_size)}
        seen = observations(step, analysis.sample_of_step(0), held)
        second = replace(second, observations=seen)
    analysis.observed = seen = dict(second.observations)
    findings = analysis.findings
    if added := (*micro_batches_added_up(step, verdict), *stale_gradients(step)):
        findings = (*added, *(replace(one, accepted=False) for one in findings))
    if not any(one.accepted for one in findings):
        findings = (*tensors_differ_between_ranks(step), *findings)
    if not any(one.accepted for one in findings):
        missed = step.oracle is not None and step.oracle.missed  # then rows differ by chance
        coupled = () if missed else rows_depend_on_each_other(step, analysis.view)
        findings = (*limited_by_hooks(step, analysis.view), *coupled, *findings)
    best = findings[0] if findings and findings[0].accepted else None
    if best is None or step.record.is_cut_short(step.group):
        why = unfaithful(step, second) or draws_otherwise(step, analysis) or draws_by_rank(step)
        if why is not None:
            return unknown(verdict, why)
    findings = with_one_process(step, analysis, findings, second)
    best = findings[0] if findings and findings[0].accepted else None
    return replace(
        verdict,
        observed=seen,
        cause=None if best is None else best.cause,
        findings=findings,
    )


def _subject(script: Script, step: ObservedStep) -> str:
    optimizers = " + ".join(step.record.step(0, step.number).optimizers)
    return f"{script.name}, step {step.number + 1} of {script.steps} ({optimizers})"
