"""Compares what every rank held at one step with what the script computes in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis import vacuity
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.observed_scripts.analysis_of_script import AnalysisOfScript
from ddp_equivalence.observed_scripts.as_case import (
    BEFORE_CLIP,
    HELD,
    OWN,
    Kind,
    ObservedStep,
    as_case,
)
from ddp_equivalence.observed_scripts.measured_step import (
    Script,
    layout_of,
    measured,
    request_of,
)
from ddp_equivalence.observed_scripts.observations import observations
from ddp_equivalence.observed_scripts.oracle import CannotReplay
from ddp_equivalence.observed_scripts.rounding_of_script import ExpectedOfScript
from ddp_equivalence.observed_scripts.seen_without_reference import (
    SAME_DATA,
    clipped_otherwise,
    faults_seen,
    micro_batches_added_up,
)
from ddp_equivalence.reference import big_batch
from ddp_equivalence.report.render import render, render_full
from ddp_equivalence.report.unknown_verdicts import unknown
from ddp_equivalence.report.verdict import Verdict

LookCloser = Callable[[ObservedStep, Verdict], Mapping[int, Observation]]
"""Rank -> what is seen of it when it runs again and is watched; empty if it cannot be."""

FAITHFUL = 1e-6
"""A rank's own gradient is that of its rows, up to a factor, if no more than this is left over. In
a lower precision this many times as much may be: """
FAITHFUL_IN_LOW_PRECISION = 0.05


def judge(script: Script, step: ObservedStep, look_closer: LookCloser | None) -> Verdict:
    """The verdict on one step: of the gradients before clipping, then of those that are stepped
    with. ``look_closer``: used if something differs; None if differences are not explained.
    """
    verdict = _compared(script, step, BEFORE_CLIP)
    if (why := _against_an_idle_plant(step)) is not None:
        return unknown(verdict, why)
    faults = tuple(faults_seen(step))
    records = [step.record.step(rank, step.number) for rank in range(step.record.world_size)]
    if verdict.outcome == "same" and any(one.clips for one in records):
        clipped = _compared(script, step, HELD)
        if clipped.outcome == "different":
            verdict, faults = clipped, (clipped_otherwise(step), *faults)
    if verdict.outcome == "different" and look_closer is not None:
        verdict = _explained(step, verdict, look_closer)
    return _with_faults(verdict, faults)


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
        outcome="unknown",
        render=render,
        render_full=render_full,
    )
    if (why := _against_the_names(step)) is not None:
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
    analysis.time = TimeLeft(script.seconds, script.seconds)
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
    seen = look_closer(step, verdict)
    if not seen:
        ranks = range(step.record.world_size)
        held = {rank: step.gradients(rank, analysis.kind) for rank in ranks}
        seen = observations(step, analysis.sample_of_step(0), held)
    analysis.observed = seen
    findings = analysis.findings
    if added := tuple(micro_batches_added_up(step, verdict)):
        findings = (*added, *(replace(one, accepted=False) for one in findings))
    best = findings[0] if findings else None
    if best is None or not best.accepted:
        why = _unfaithful(step) or _draws_otherwise(step, analysis)
        if why is not None:
            return unknown(verdict, why)
    return replace(
        verdict,
        observed=seen,
        cause=best.cause if best is not None and best.accepted else None,
        findings=findings,
    )


def _unfaithful(step: ObservedStep) -> Unknown | None:
    """Why a difference may lie in the replay: on no rank do its rows alone give, in one process,
    the loss or a multiple of the gradient that the rank itself computed.
    """
    losses = []
    for rank, rows in enumerate(step.rows_by_rank):
        own = step.gradients(rank, OWN)
        try:
            alone = step.answer(rows)
        except CannotReplay:
            return None
        found = {step.short(name): one for name, one in alone.gradients(BEFORE_CLIP).items()}
        recorded = step.record.step(rank, step.number)
        loss, of_rank = sum(alone.losses), sum(recorded.losses)
        in_float64 = all(one.dtype is torch.float64 for one in found.values() if one is not None)
        most = FAITHFUL if in_float64 else FAITHFUL_IN_LOW_PRECISION
        if abs(loss - of_rank) <= most * abs(of_rank) or _left_over(own, found) <= most:
            return None
        losses.append(f"{text_of(of_rank, '.6g')} on rank {rank}, {text_of(loss, '.6g')} alone")
    return Unknown(
        UnknownBecause.CANNOT_REPLAY,
        "one process does not compute again what a rank computed from the same rows alone (losses: "
        f"{'; '.join(losses)}). Either the script computes something else on several ranks, or it "
        "depends on something that is in no weight, buffer, batch or random generator of torch",
    )


def _draws_otherwise(step: ObservedStep, analysis: AnalysisOfScript) -> Unknown | None:
    """Why a difference may lie in the random numbers: one process may not draw for each row what
    its rank drew. Then another order of the rows gives it another gradient.
    """
    oracle, ranks = step.oracle, range(step.record.world_size)
    if oracle is None or not any(step.record.step(r, step.number).draws for r in ranks):
        return None
    if not (oracle.missed or analysis.order_matters):
        return None
    missed = ", ".join(oracle.missed)
    return Unknown(
        UnknownBecause.CANNOT_REPLAY,
        "one process cannot draw for each row the random numbers that its rank drew"
        + (f" ({missed})" if missed else ": the ranks' rows in another order give another gradient")
        + ". Turn off what is random, such as drop path; --no-dropout turns off torch's dropout",
    )


def _left_over(own: Mapping[str, Tensor | None], alone: Mapping[str, Tensor | None]) -> float:
    """What no multiple of ``alone`` explains of ``own``, relative to ``own``; 1 without any."""
    pairs = [
        (one.double().reshape(-1), other.double().reshape(-1))
        for name, one in own.items()
        if one is not None and (other := alone.get(name)) is not None
    ]
    if not pairs:
        return 1.0
    product = sum(float(one @ other) for one, other in pairs)
    squares = sum(float(other @ other) for _, other in pairs)
    norm = sum(float(one @ one) for one, _ in pairs)
    if not norm or not squares:
        return 1.0
    factor = product / squares
    left = sum(float((one - factor * other).square().sum()) for one, other in pairs)
    return float((left / norm) ** 0.5)


def _against_an_idle_plant(step: ObservedStep) -> Unknown | None:
    """Nothing is shown if a planted fault never did its damage."""
    ranks = range(step.record.world_size)
    fired = [step.record.step(rank, step.number).planted for rank in ranks]
    if any(count is None or count > 0 for count in fired):
        return None
    return Unknown(
        UnknownBecause.PLANTED_FAULT_NEVER_FIRED,
        "a fault was planted, but the script never reached the place where it does its damage",
    )


def _subject(script: Script, step: ObservedStep) -> str:
    optimizers = " + ".join(step.record.step(0, step.number).optimizers)
    return f"{script.name}, step {step.number + 1} of {script.steps} ({optimizers})"


def _against_the_names(step: ObservedStep) -> Unknown | None:
    """Nothing can be compared if the optimizer's parameters are in no module that was called."""
    recorded = step.record.step(0, step.number)
    if recorded.unnamed and not step.weights():
        return Unknown(
            UnknownBecause.NOTHING_TO_COMPARE,
            f"no parameter of the optimizer ({', '.join(recorded.optimizers)}) is one of a module "
            "that the script calls, as with ZeRO and with FSDP of the first version: their "
            "gradients are not seen",
        )
    return None
