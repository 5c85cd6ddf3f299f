"""Compares what every rank held at one step with what the script computes in one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.case.training import Training
from ddp_equivalence.comparison.chunks import chunks
from ddp_equivalence.comparison.comparator import Comparator
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.comparison.gradients import describe
from ddp_equivalence.comparison.tolerance import Tolerance
from ddp_equivalence.diagnosis import vacuity
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.measure import Measurement, finished
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.observed_scripts.analysis_of_script import AnalysisOfScript
from ddp_equivalence.observed_scripts.as_case import ObservedStep, as_case
from ddp_equivalence.observed_scripts.observations import observations
from ddp_equivalence.observed_scripts.rounding_of_script import ExpectedOfScript
from ddp_equivalence.observed_scripts.seen_without_reference import faults_seen
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.reference import big_batch
from ddp_equivalence.report.render import render, render_full
from ddp_equivalence.report.unknown_verdicts import unknown
from ddp_equivalence.report.verdict import Verdict

SECONDS_TO_EXPLAIN = 60.0
"""What explaining a difference may take."""

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Script:
    """``name``: as reports call the script. ``float64``: it was observed in float64.

    ``on_cpu``: its CUDA devices were the CPU. ``steps``: how many were recorded. ``repeat``: the
    command that observes it again. ``seconds``: what explaining a difference may take.
    """

    name: str
    backend: str
    float64: bool
    on_cpu: bool = False
    steps: int = 1
    repeat: str = ""
    seconds: float = SECONDS_TO_EXPLAIN


def judge(
    script: Script, step: ObservedStep, observed: Mapping[int, Observation] | None = None
) -> Verdict:
    """The verdict on one step: of the gradients before clipping, then of those that are stepped
    with. ``observed``: what was seen of the ranks, if the step was watched.
    """
    verdict = _judge(script, step, "before_clip", observed or {})
    if (why := _against_an_idle_plant(step)) is not None:
        return unknown(verdict, why)
    seen = tuple(faults_seen(step))
    if seen and (verdict.outcome == "same" or verdict.cause == "weights_differ_between_ranks"):
        found = tuple(one for one in verdict.findings if one.cause != seen[0].cause)
        findings = (*seen[:1], *(replace(one, accepted=False) for one in found))
        return replace(verdict, outcome="different", cause=seen[0].cause, findings=findings)
    clips = any(step.record.step(rank, step.number).clips for rank in range(_ranks(step)))
    if verdict.outcome != "same" or not clips:
        return verdict
    clipped = _judge(script, step, "held", observed or {})
    return verdict if clipped.outcome == "unknown" else clipped


def _judge(
    script: Script, step: ObservedStep, kind: str, observed: Mapping[int, Observation]
) -> Verdict:
    case = as_case(step, kind, _layout(step), _dtype(step))
    lane = Lane(
        script.backend,
        script.backend,
        "cpu",
        reason="its CUDA devices were the CPU" if script.on_cpu else "",
    )
    request = _request(script, case, lane)
    verdict = Verdict(
        case=case,
        subject=_subject(script, step),
        repeat=script.repeat,
        promise="",
        lane=lane,
        outcome="unknown",
        render=render,
        render_full=render_full,
    )
    try:
        reference = big_batch(case)
    except BadCase as error:
        cause = error.__cause__
        return unknown(verdict, Unknown(UnknownBecause.CANNOT_REPLAY, str(cause or error)))
    if not script.float64 or reference.lowest_dtype is not torch.float64:
        reference = replace(reference, why_not_float64="the script computes in a lower precision")
    verdict = replace(verdict, examples=reference.examples)
    if (why := _against_the_names(step) or vacuity.against_the_reference(reference)) is not None:
        return unknown(verdict, why)
    expected = ExpectedOfScript(reference, step, kind)
    analysis = AnalysisOfScript(request, expected)
    analysis.time = TimeLeft(script.seconds, script.seconds)
    measurement = _measured(step, kind, expected, analysis.sample)
    verdict = replace(
        verdict,
        comparison=measurement.comparison,
        evidence=measurement.evidence,
        analysis=analysis,
        observed=observed,
    )
    if measurement.comparison.same:
        why = vacuity.against_a_pass(
            measurement.comparison, measurement.evidence, lambda: verdict.nearest
        )
        return replace(verdict, outcome="same") if why is None else unknown(verdict, why)
    analysis.measurement = measurement
    held = {rank: step.gradients(rank, kind) for rank in range(_ranks(step))}
    seen = observed or observations(step, analysis.sample_of_step(0), held)
    analysis.observed = seen
    verdict = replace(verdict, observed=seen)
    findings = analysis.findings
    best = findings[0] if findings else None
    return replace(
        verdict,
        outcome="different",
        cause=best.cause if best is not None and best.accepted else None,
        findings=findings,
    )


def _against_an_idle_plant(step: ObservedStep) -> Unknown | None:
    """Nothing is shown if a planted fault never did its damage."""
    fired = [step.record.step(rank, step.number).planted for rank in range(_ranks(step))]
    if any(count is None or count > 0 for count in fired):
        return None
    return Unknown(
        UnknownBecause.PLANTED_FAULT_NEVER_FIRED,
        "a fault was planted, but the script never reached the place where it does its damage",
    )


def _subject(script: Script, step: ObservedStep) -> str:
    optimizers = " + ".join(step.record.step(0, step.number).optimizers)
    return f"{script.name}, step {step.number + 1} of {script.steps} ({optimizers})"


def _request(script: Script, case: object, lane: Lane) -> Request:
    def step(model: object, shard: object, rank: Rank) -> None:
        """Stands for the script, which no rank can run as a step."""

    step.__name__ = script.name
    return Request(
        case=case,  # type: ignore[arg-type]
        step=step,
        strategy=None,
        compare="gradients",
        training=Training(),
        seeds="alike",
        steps=1,
        lane=lane,
        deadline=script.seconds,
        collective_deadline=script.seconds,
        fresh=False,
        in_process=False,
        allow_changes=True,
        second_look=False,
        plant="",
    )


def _measured(
    step: ObservedStep,
    kind: str,
    expected: ExpectedOfScript,
    sample: ElementSample[GradientKey],
) -> Measurement:
    """What the ranks held, compared with what is expected."""
    reference = expected.reference
    tolerance = Tolerance(reference.lowest_dtype)
    comparator = Comparator(reference.expected, expected.described, tolerance)
    evidence, measured = {}, {}
    for rank in range(_ranks(step)):
        gradients: dict[GradientKey, Tensor | None] = {
            (0, name): one for name, one in step.gradients(rank, kind).items()
        }
        comparator.begin(rank, describe(gradients))
        for chunk in chunks(gradients):
            comparator.add(rank, chunk)
        measured[rank] = {
            key: sample.of_one(key, gradient)
            for key, gradient in gradients.items()
            if gradient is not None and key in sample.sizes
        }
        evidence[rank] = _evidence(step, rank, gradients)
    names = {name for rank in evidence for name in step.record.step(rank, step.number).autocast}
    autocast = max(
        (AUTOCAST[name] for name in names if name in AUTOCAST),
        key=lambda dtype: torch.finfo(dtype).eps,
        default=None,
    )
    if reference.lowest_dtype is torch.float64:
        autocast = None
    return Measurement(
        comparison=finished(comparator, expected, tolerance, autocast),
        evidence=evidence,
        measured=measured,
        output={},
        changed={},
        changes_error=None,
        outdated=False,
    )


def _evidence(
    step: ObservedStep, rank: int, gradients: Mapping[GradientKey, Tensor | None]
) -> Evidence:
    recorded = step.record.step(rank, step.number)
    return Evidence(
        examples=(step.rows_by_rank[rank],),
        data=step.digests_of_rows(rank),
        inputs=None,
        start=digest(step.weights()),
        collectives=None,
        device="cpu",
        gradients=describe(gradients),
        autocast=frozenset(("cpu", AUTOCAST[one]) for one in recorded.autocast if one in AUTOCAST),
    )


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


def _layout(step: ObservedStep) -> str:
    world_size = _ranks(step)
    local = step.record.runs[0].get("local_world_size") or world_size
    nodes, rest = divmod(world_size, local)
    return f"{nodes}x{local}" if nodes and not rest else f"1x{world_size}"


def _dtype(step: ObservedStep) -> torch.dtype | None:
    return None  # the weights keep the precision that they have in the script


def _ranks(step: ObservedStep) -> int:
    return step.record.world_size


def name_of_script(command: tuple[str, ...], main: str) -> str:
    """What reports call the script: the name of its file, or of the command."""
    if main:
        return os.path.basename(main)
    return os.path.basename(command[0])
