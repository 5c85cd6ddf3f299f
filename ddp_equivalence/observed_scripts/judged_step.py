"""Compares what every rank held at one step with what the script computes in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import isnan
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.chunks import chunks
from ddp_equivalence.comparison.comparison import Comparator
from ddp_equivalence.comparison.gradients import ElementSample, describe, digest, in_first_step
from ddp_equivalence.comparison.rounding import (
    OF_ORDER,
    Expected,
    Rounding,
    larger_noise,
    noise_of,
    relative_noise,
)
from ddp_equivalence.comparison.tolerance import Noise, Tolerance
from ddp_equivalence.diagnosis import vacuity
from ddp_equivalence.diagnosis.analysis import Analysis
from ddp_equivalence.diagnosis.causes.clipping import WHILE_SCALED
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.draws import ReferenceDraws
from ddp_equivalence.diagnosis.localisation import Localisation, one_rank_shows_more
from ddp_equivalence.diagnosis.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.state import BufferBeside, error_of, finding_of_state
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.diagnosis.view import View, with_measurement
from ddp_equivalence.diagnosis.where.divergence import (
    COARSEST,
    BesideOneRank,
    divergences,
    logs_of,
    past_autograd,
)
from ddp_equivalence.diagnosis.where.lines_of_divergences import lines_of_divergences
from ddp_equivalence.diagnosis.where.relations import Sharing
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind
from ddp_equivalence.measurement.measure import Measurement, OneRank, autocast_of, finished
from ddp_equivalence.measurement.observation import Backward, Forward, Observation, RowsRead
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.observed_scripts.not_comparable import (
    against_the_names,
    draws_otherwise,
    padded_by_guess,
    reads_otherwise,
    unfaithful,
)
from ddp_equivalence.observed_scripts.oracle import CannotReplay
from ddp_equivalence.observed_scripts.queries import OF_RECORD, RowOrder, State
from ddp_equivalence.observed_scripts.record import BEFORE_CLIP, HELD, GradientKind
from ddp_equivalence.observed_scripts.script_step import ScriptStep, SecondRun, case_of
from ddp_equivalence.observed_scripts.seen_in_record import (
    NOT_ADDITIVE,
    OF_BATCH_NORM,
    SAME_DATA,
    clipped_otherwise,
    faults_seen,
    is_equal,
    line_of_buffer,
    lines_at,
    micro_batches_added_up,
    other_optimizers_step,
    reduces_after_clipping,
    stale_gradients,
    tensors_differ_between_ranks,
    wrong_though_averaged,
)
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.reference import Reference, big_batch
from ddp_equivalence.report.verdict import Asked, Verdict, unknown

OTHER_ROW_ORDERS: tuple[RowOrder, ...] = ("in blocks", "in dim 1")
NO_ROWS: RowOrder = "no rows"

EPOCHS_TAKE = 4
"""So many times as long may be spent on a step for which every question takes an epoch."""

LookCloser = Callable[[ScriptStep, "AnalysisOfScript"], SecondRun]
"""Watches the ranks while they run again; the result is empty if they cannot be."""


def judge(step: ScriptStep, look_closer: LookCloser | None) -> Verdict:
    """The verdict on one step: of the gradients before clipping, unless they are reduced after it,
    then of those that are stepped with. ``look_closer``: used if something differs; None if
    differences are not explained.
    """
    kind = HELD if reduces_after_clipping(step) else BEFORE_CLIP
    if step.before is not None and (parted := tuple(other_optimizers_step(step))):
        last = _compared(step.before, kind)
        if last.comparison is not None:
            subject = f"{step.script.name}, after step {step.number} of {step.script.steps}"
            last = replace(last, subject=subject, outcome="different", analysis=None)
            return replace(last, cause=parted[0].cause, findings=parted)
    verdict = _with_draws_in_order(step, kind)
    evidence, layout = verdict.evidence, verdict.case.ranks
    idle = evidence and vacuity.against_an_idle_plant(evidence, step.script.plant, layout)
    if idle:
        return unknown(verdict, idle)
    faults = tuple(faults_seen(step))
    if verdict.outcome == "different" and not faults:
        guessed = padded_by_guess(step)
        verdict = verdict if guessed is None else unknown(verdict, guessed)
    if verdict.outcome == "same" and kind != HELD and any(one.clips for one in step.recorded):
        clipped = _compared(step, HELD)
        if clipped.outcome == "different":
            seen_scaled = any(one.cause == WHILE_SCALED.name for one in faults)
            otherwise = () if seen_scaled else (clipped_otherwise(step),)
            verdict, faults = clipped, (*otherwise, *faults)
    if verdict.outcome == "same":
        verdict = _with_state_of_one_process(step, verdict, kind)
    elif verdict.outcome == "different" and look_closer is not None:
        verdict = _explained(step, verdict, look_closer)
    return _with_faults(verdict, faults)


def _with_draws_in_order(step: ScriptStep, kind: GradientKind) -> Verdict:
    """The verdict, where one process draws for the rows in the order that the script really has.

    It does not, if another order of the rows gives another gradient. Then other ways are tried.
    Where all ranks draw the same, their numbers may also belong to no row.
    """
    verdict, oracle = _compared(step, kind), step.oracle
    if oracle is None or not step.draws or verdict.outcome != "different":
        return verdict
    usual, missed, alike = oracle.row_order, oracle.missed, oracle.alike
    others = OTHER_ROW_ORDERS if _order_matters(verdict) or missed else ()
    if step.record.ranks_draw_alike(step.number):
        others = (*others, NO_ROWS)  # exchanging ranks does not show it
    for row_order in others if usual == "by row" else ():
        oracle.row_order, oracle.missed, oracle.alike = row_order, {}, {}
        other = _compared(step, kind)
        is_this = _order_matters(verdict) and not _order_matters(other) and not oracle.missed
        if other.outcome == "same" or (is_this and other.outcome == "different"):
            return other
    oracle.row_order, oracle.missed, oracle.alike = usual, missed, alike
    return verdict


def _order_matters(verdict: Verdict) -> bool:
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
    return _named(replace(verdict, reason=""), (first, *map(_rejected, others)))


def _rejected(finding: Finding) -> Finding:
    return replace(finding, accepted=False)


def _named(verdict: Verdict, findings: tuple[Finding, ...]) -> Verdict:
    """It is different, for the cause of the first of these, if that is accepted."""
    best = findings[0] if findings and findings[0].accepted else None
    cause = None if best is None else best.cause
    return replace(verdict, outcome="different", cause=cause, findings=findings)


def _compared(step: ScriptStep, kind: GradientKind) -> Verdict:
    """Same, different or unknown, before any cause is looked for."""
    case, script = case_of(step, kind), step.script
    optimizers = " + ".join(step.recorded[0].optimizers)
    verdict = Verdict(
        case=case,
        subject=f"{script.name}, step {step.number + 1} of {script.steps} ({optimizers})",
        repeat=script.repeat,
        lane=script.lane,
        asked=Asked(of_script=True),
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
    analysis = AnalysisOfScript(step, kind, ExpectedOfScript(reference, step, kind))
    measurement = _measured(step, kind, analysis)
    comparison, evidence = measurement.comparison, measurement.evidence
    verdict = replace(verdict, comparison=comparison, evidence=evidence, analysis=analysis)
    if comparison.same:
        why = vacuity.against_a_pass(comparison, evidence, lambda: verdict.nearest)
        return replace(verdict, outcome="same") if why is None else unknown(verdict, why)
    analysis.measurement = measurement
    return replace(verdict, outcome="different")


def _explained(step: ScriptStep, verdict: Verdict, look_closer: LookCloser) -> Verdict:
    """The difference with its cause, if one of the known explanations fits."""
    analysis = verdict.analysis
    assert isinstance(analysis, AnalysisOfScript)
    if (why := reads_otherwise(step)) is not None:
        return unknown(verdict, why)
    second = look_closer(step, analysis)
    if not second.observations:
        sample = analysis.sample_of_step(0)
        seen = {rank: _observation(step, rank, sample, analysis.kind) for rank in step.ranks}
        second = replace(second, observations=seen)
    analysis.second, analysis.observed = second, second.observations
    findings = analysis.findings
    if added := (*micro_batches_added_up(step, verdict), *stale_gradients(step)):
        findings = (*added, *map(_rejected, findings))
    if not any(one.accepted for one in findings):
        findings = (*tensors_differ_between_ranks(step), *findings)
    if not any(one.accepted for one in findings):
        missed = step.oracle is not None and step.oracle.missed  # then rows differ by chance
        averaged = () if missed else wrong_though_averaged(step, analysis.view)
        findings = (*averaged, *findings)
    best = findings[0] if findings and findings[0].accepted else None
    if best is None or step.ends_epoch_early:
        why = unfaithful(step, second) or draws_otherwise(step, analysis.order_matters)
        if why is not None:
            return unknown(verdict, why)
    if best is not None and best.cause == NOT_ADDITIVE and analysis.view is not None:
        beside = analysis.beside
        lines = () if beside is None else lines_of_divergences(beside, analysis.view)
        findings = (replace(best, lines=lines or best.lines), *findings[1:])
    return _named(replace(verdict, observed=dict(second.observations)), findings)


# The gradients of the ranks, compared with those that are expected.

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _measured(step: ScriptStep, kind: GradientKind, analysis: AnalysisOfScript) -> Measurement:
    """What the ranks held, in the form in which ``check`` measures steps."""
    reference, sample, expected = analysis.reference, analysis.sample, analysis.expected
    tolerance = Tolerance(reference.lowest_dtype)
    comparator = Comparator(reference.expected, expected.described, tolerance)
    evidence, sampled = {}, {}
    for rank in step.ranks:
        gradients = in_first_step(step.gradients(rank, kind))
        comparator.begin(rank, describe(gradients))
        for chunk in chunks(gradients):
            comparator.add(rank, chunk)
        sampled[rank] = {
            key: sample.of_one(key, gradient)
            for key, gradient in gradients.items()
            if gradient is not None and key in sample.sizes
        }
        evidence[rank] = _evidence(step, rank, gradients)
    autocast = None  # it does nothing in float64
    if reference.lowest_dtype is not torch.float64:
        autocast = autocast_of(evidence)
    return Measurement(finished(comparator, expected, tolerance, autocast), evidence, sampled)


def _evidence(
    step: ScriptStep, rank: int, gradients: Mapping[GradientKey, Tensor | None]
) -> Evidence:
    recorded = step.recorded[rank]
    return Evidence(
        examples=(step.rows_by_rank[rank],),
        data=step.digests_of_rows(rank),
        inputs=None,
        start=digest(step.weights()),
        collectives=None,
        device="cpu",
        gradients=describe(gradients),
        planted=recorded.planted,
        autocast=frozenset(("cpu", AUTOCAST[x]) for x in recorded.autocast if x in AUTOCAST),
    )


def _request_of(step: ScriptStep, case: Case) -> Request:
    """The request of a ``check``, if the script were a step."""
    script = step.script

    def stands_for_the_script(model: object, shard: object, rank: Rank) -> None:
        """No rank can run the script as a step."""

    stands_for_the_script.__name__ = script.name
    return Request(
        case=case,
        step=stands_for_the_script,
        lane=script.lane,
        deadline=script.seconds,
        collective_deadline=script.seconds,
        allow_changes=True,
    )


# How far rounding alone moves the gradient that the script computes in one process.

LARGEST = 0.02
"""Another order of the rows that moves the gradient by more than this is no rounding: the loss
depends on the order."""

LARGEST_IN_FLOAT64 = 1e-4
"""As ``LARGEST``, for a script of which every part computes in float64."""

EPS_OF_FLOAT32 = torch.finfo(torch.float32).eps


class ExpectedOfScript(Expected):
    """The script's own gradient of all rows, and its rounding: it is asked for the rows in other
    orders, with weights that are moved by one eps. ``kind``: as in ``case_of``.
    """

    def __init__(self, reference: Reference, step: ScriptStep, kind: GradientKind) -> None:
        super().__init__(reference)
        self._step, self._kind = step, kind

    def _orders(self) -> list[tuple[int, ...]]:
        by_rank = self._step.rows_by_rank
        ranks = len(by_rank)
        other_ranks = [
            tuple(row for rank in range(ranks) for row in by_rank[(first - rank) % ranks])
            for first in range(ranks - 1, -1, -1)
        ]
        orders = [order for order in other_ranks if order != self._step.everything]
        if not self._step.draws:
            orders.insert(1, tuple(row for rows in by_rank for row in rows[::-1]))
            orders.insert(0, self._step.everything[::-1])
        return orders

    def measure(self, autocast: torch.dtype | None, more: bool = False) -> Rounding:
        """With the ranks in reverse order, and without random numbers each rank's rows too; or in
        further orders.
        """
        truth = self.reference.expected
        dtypes = [self.reference.lowest_dtype, *([] if autocast is None else [autocast])]
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        noise, order_matters = dict.fromkeys(truth, Noise()), False
        for nudge, order in enumerate(self._orders()[: None if more else 2], start=1):
            try:
                answer = self._step.answer(order, nudge)
            except CannotReplay:
                continue
            found = in_first_step(self._step.by_short_name(answer.gradients(self._kind)))
            found = {key: None if one is None else one.double() for key, one in found.items()}
            of_order = noise_of(truth, found)
            inside = torch.finfo(getattr(torch, answer.lowest)).eps if answer.lowest else 0.0
            in_float64 = max(eps, inside) < EPS_OF_FLOAT32
            largest = LARGEST_IN_FLOAT64 if in_float64 else max(LARGEST, OF_ORDER * eps)
            if relative_noise(truth, of_order) > largest:
                order_matters = True
            else:
                noise = larger_noise(noise, of_order)
        return Rounding(noise, order_matters)


# What is costly to know of a step that differs, computed when it is asked for.

MARKED = "> marks where the ranks part from one process that has all rows."


class AnalysisOfScript(Analysis):
    """An analysis of a step that no rank can run again, since it is a part of a script.

    ``kind``: which gradients are compared. ``second``: the second run, set before it is asked for.
    """

    def __init__(self, step: ScriptStep, kind: GradientKind, expected: ExpectedOfScript) -> None:
        super().__init__(_request_of(step, expected.reference.case), expected)
        self.step, self.kind, self.expected, self.second = step, kind, expected, SecondRun()
        seconds = step.script.seconds * (EPOCHS_TAKE if step.ends_epoch_early else 1)
        self.time = TimeLeft(seconds, seconds)

    @property
    def order_matters(self) -> bool:
        """True if the script computes another gradient for its rows in another order."""
        return self.expected.rounding.order_matters

    @cached_property
    def beside(self) -> BesideOneRank | None:
        """What the ranks did otherwise than one process that has all rows."""
        view, best = self.view, self.explanations[0] if self.explanations else None
        believed = best if best is not None and best.accepted else None
        if view is None or not self.second.operations or not one_rank_shows_more(believed):
            return None
        largest = float(view.expected.abs().max())
        with suppress(CannotReplay):
            return unless_it_fails(lambda: self._beside(largest), lambda why: None)
        return None

    def _beside(self, largest: float) -> BesideOneRank | None:
        """``largest``: element of the gradient of all rows. Raises CannotReplay."""
        step, oracle, by_rank = self.step, self.step.oracle, self.second.operations
        if oracle is None or len(by_rank) < len(step.ranks):
            return None
        alone = oracle.logged(step.group, step.rows, self.second.module)
        if alone is None or not all(one.complete for one in (alone, *by_rank.values())):
            return None
        dtypes = {value.dtype for value in alone.values if value.is_floating_point} or {"float64"}
        eps = max(torch.finfo(getattr(torch, name)).eps for name in dtypes)
        order = oracle.order_of(step.group, step.rows)
        if eps > COARSEST or sorted(order) != sorted(range(len(step.rows))):
            return None  # some rows are in several micro-batches
        place = {row: number for number, row in enumerate(order)}
        rows = tuple(tuple(place[row] for row in of_rank) for of_rank in step.rows_by_rank)
        logs = logs_of(OneRank(by_rank, alone), Sharing(rows, len(order), eps, largest))
        return BesideOneRank(
            is_right_alone=True,
            factor_alone=1.0,
            divergences=divergences(logs),
            past_autograd=past_autograd(logs),
        )

    @cached_property
    def localisation(self) -> Localisation:
        """As for a step; but one process is what the ranks are compared with, so that nothing is
        said of whether it is right.
        """
        found = super().localisation
        seen = found.whereabouts
        if seen is None or seen.is_right_alone is None:
            return found
        marks = MARKED if seen.marks else ""
        return replace(found, whereabouts=replace(seen, is_right_alone=None, marks=marks))

    @cached_property
    def draws(self) -> ReferenceDraws | None:
        """None: the script itself draws for its big batch what the ranks drew."""
        return None

    @cached_property
    def view_of_own_draws(self) -> View | None:
        """The view of the step. On one rank the script computes the big batch, by definition."""
        if self.measurement is None or self.why_no_view:
            return None
        view, other_bits = self._view_of_step(0), self.repeated is False
        seen = view and with_measurement(view, self.measurement, self.observed, 0, other_bits)
        return seen and replace(seen, factor_on_one_rank=lambda: 1.0)


# Compares the buffers that the ranks leave with those of one process that has all rows.
#
# From the buffers that the ranks had, one process may compute the same gradients in every step,
# while each rank moves a codebook or a centre by its own rows. So the next step is computed once
# more, from the buffers that the one process has left itself.


def _with_state_of_one_process(step: ScriptStep, verdict: Verdict, kind: GradientKind) -> Verdict:
    """The verdict on a step that is the same; or "different", if it is not the same from the
    buffers that one process has after the step before.
    """
    try:
        moved, state = _moved_otherwise(step)
        beside = _compared(replace(step, state=state), kind) if moved else verdict
    except CannotReplay:
        return verdict
    if beside.outcome != "different":
        return verdict
    note = f"changes {step.short(moved[0].name)}, and not as one process with all rows does"
    finding = replace(
        finding_of_state([replace(one, name=step.short(one.name)) for one in moved], {}, {}),
        unexplained=0.0,
        lines=lines_at(line_of_buffer(step, moved[0].name), note),
    )
    return _named(beside, (finding,))


def _moved_otherwise(step: ScriptStep) -> tuple[list[BufferBeside], State]:
    """The buffers that rank 0 had otherwise at the beginning of the step than one process, which
    has computed the step before with all rows; and where those of the one process are. None are
    known if it did not compute the two steps one after the other. Raises CannotReplay.
    """
    before, oracle = step.before, step.oracle
    if before is None or oracle is None or step.number != step.group[0]:
        return [], OF_RECORD
    now, earlier = step.recorded[0], before.recorded[0]
    answer = oracle.answer(step.group, step.rows)
    alone = answer.steps[0]
    of_ranks = sum(one.rows_of_calls for one in before.recorded)
    if answer.missed or alone.left_by != (before.number, of_ranks):
        return [], OF_RECORD
    moved = [
        BufferBeside(name, error, (0,))
        for name, value in now.states.items()
        if name not in now.held and not name.endswith(OF_BATCH_NORM)
        if not is_equal(earlier.states.get(name), value)
        if name in alone.left and (error := error_of(value, alone.left[name]))
    ]
    return moved, State(answer.files[0], tuple(one.name for one in moved))


# What a rank was seen to do, from its record alone, where no second run has shown it.


def _observation(
    step: ScriptStep, rank: int, sample: ElementSample[str], kind: GradientKind
) -> Observation:
    recorded, held = step.recorded[rank], step.gradients(rank, kind)
    weights = repr(sorted(one for one in recorded.weights.items() if step.short(one[0]) in held))
    before = sum(len(step.record.step(rank, n).losses) for n in step.group if n < step.number)
    called = {call.backwards: call for call in reversed(recorded.calls)}
    forwards, backwards, calls = list[Forward](), list[Backward](), list[Call]()

    def happened(kind: Kind, at: CodeLine | None, **more: Any) -> None:
        calls.append(Call(kind, at, at, step=0, backwards=len(backwards), **more))

    for number, loss in enumerate(recorded.losses):
        read = [
            (place,)
            for place, row in enumerate(step.rows)
            if row.rank == rank and row.micro_batch == before + number
        ]
        rows = RowsRead(tuple(read)) if read else None
        forwards.append(Forward(rows, weights, generator=b"", seed=0, step=0))
        if number in called:
            happened(Kind.FORWARD, called[number].place, what=called[number].module)
        happened(Kind.BACKWARD, recorded.backward_at[number], value=loss)
        own = step.by_short_name(recorded.own_of_each[number])
        is_known = own.keys() >= sample.sizes.keys()
        gradient = sample.of({name: own[name] for name in sample.sizes}) if is_known else None
        backwards.append(Backward(loss, len(forwards), (None, None), step=0, gradient=gradient))
    for clip in recorded.clips:
        norm = {} if isnan(clip.norm) else {"norm": clip.norm, "what": "clip_grad_norm_"}
        happened(Kind.CLIP, clip.place, value=clip.limit, names=tuple(sample.sizes), **norm)
    happened(Kind.OPTIMIZER_STEP, recorded.stepped_at, what=recorded.optimizers[0])
    return Observation(
        forwards=tuple(forwards),
        backwards=tuple(backwards),
        wrappers=(),
        frozen=tuple(map(step.short, sorted(recorded.frozen))),
        buffers="",
        gradients={(0, name): digest({name: gradient}) for name, gradient in held.items()},
        clipped=tuple(clip.limit for clip in recorded.clips),
        calls=tuple(calls),
    )
