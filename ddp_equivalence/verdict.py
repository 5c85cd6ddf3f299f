"""check(): case and step in, verdict out; assert_equivalent() raises, once, at the edge."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from ddp_equivalence import guards, session
from ddp_equivalence.building import Steps, random_numbers_kept
from ddp_equivalence.case import Case, name_of
from ddp_equivalence.clues import Clues, clues
from ddp_equivalence.comparison import Comparison
from ddp_equivalence.diagnoses.view import View
from ddp_equivalence.diagnosis import Finding, NearestFault, diagnose
from ddp_equivalence.errors import NotEquivalent, NothingCompared, RankFailed, RanksTimedOut
from ddp_equivalence.faults.plant import intact
from ddp_equivalence.measurement import (
    Measurement,
    at_work,
    measure,
    observe,
    wrong_collectives,
)
from ddp_equivalence.observation import Observation
from ddp_equivalence.rank_work import Evidence, Step
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.reference import Compare, Reference, big_batch
from ddp_equivalence.report import render
from ddp_equivalence.request import Request, read_request, repeat_line
from ddp_equivalence.second_look import SecondLook, second_look
from ddp_equivalence.shards import OWN, split
from ddp_equivalence.shares import Shares, shares_of
from ddp_equivalence.surroundings import Surroundings, without_ranks
from ddp_equivalence.taken_apart import first_wrong_step, repeats, taken_apart
from ddp_equivalence.threads import threads_beside, threads_for
from ddp_equivalence.whose_mean import WhoseMean, whose_mean

Outcome = Literal["same", "different", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """What a check found. ``print(verdict)`` is the report that a failing test shows.

    ``outcome``: "same", "different" or "unknown" (then ``reason`` says why nothing was shown).
    ``cause``: the public name of the accepted explanation, or None; ``causes``: where it takes two.
    ``findings``: all explanations considered, best first. ``comparison``: per parameter and rank.
    ``evidence``: rank -> what really ran; ``observed``: rank -> what a closer look at a second run
    saw, ``repeated``: whether that left the same bits (None if not known). ``planted``: the fault
    that was planted.
    ``failure``: the ranks' failure, if they failed. ``second_look``: what a second try on fresh
    ranks showed, where the first one hung or was aborted. ``output``: rank -> what it printed.
    ``changed``: rank -> what the step changed in its process, or left running there.
    """

    case: Case
    subject: str
    promise: str
    lane: Lane
    outcome: Outcome
    reason: str = ""
    cause: str | None = None
    findings: tuple[Finding, ...] = ()
    comparison: Comparison | None = None
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    observed: Mapping[int, Observation] = field(default_factory=dict)
    repeated: bool | None = None
    planted: str = ""
    examples: tuple[int, ...] = ()
    compare: Compare = "gradients"
    lr: float = 0.1
    failure: RankFailed | None = None
    output: Mapping[int, str] = field(default_factory=dict)
    changed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    second_look: SecondLook | None = None
    seconds: float = 0.0
    repeat: str = ""
    around: Surroundings | None = field(default=None, repr=False, compare=False)
    view: View | None = field(default=None, repr=False, compare=False)
    no_view: str = field(default="", repr=False, compare=False)
    _of_weights: Mapping[str, float] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return render(self)

    @property
    def causes(self) -> tuple[str, ...]:
        """The names of all causes that it takes to explain what was measured."""
        first = self.findings[0] if self.findings else None
        return first.causes if first is not None and first.accepted else ()

    @property
    def shares(self) -> Shares | None:
        """How often each example entered what each rank holds; computed when asked for."""
        found = self._shares_or_why
        return None if isinstance(found, str) else found

    @property
    def why_no_shares(self) -> str:
        """Why there are none, in words; "" if there are."""
        found = self._shares_or_why
        return found if isinstance(found, str) else ""

    @cached_property
    def _shares_or_why(self) -> Shares | str:
        return self.no_view if self.view is None else shares_of(self.view)

    @cached_property
    def whose_mean(self) -> WhoseMean | None:
        """What the loss, the ranks and the big batch divide by, where a count makes it plain."""
        return None if self.view is None else whose_mean(self.view)

    @cached_property
    def clues(self) -> Clues:
        """What is known of the difference beside its cause; computed when asked for."""
        if self.view is None or self.comparison is None:
            return Clues(weights=self._of_weights)
        return clues(self.view, self.comparison, named=self.cause is not None)

    @property
    def nearest(self) -> NearestFault | None:
        """The known fault that would be hardest to see on this case, and how far away it lies.

        Computed when asked for; None where the model is too large to tell.
        """
        compared = self.comparison is not None and self.around is not None
        return self.around.nearest if compared and self.around else None

    @property
    def error(self) -> float | None:
        """||measured - big batch|| / ||big batch|| of the parameter nearest to, or furthest
        beyond, its limit, on its worst rank.
        """
        worst = self.comparison.worst if self.comparison else None
        return worst.error if worst else None

    @property
    def floor(self) -> float | None:
        """What rounding alone does to that parameter on one device.

        Measured when asked for, if the verdict did not depend on it; None where the model is too
        large to be kept for that.
        """
        worst = self.comparison.worst if self.comparison else None
        if worst is None or self.around is None:
            return None
        return worst.limit.floor or self.around.floor_of(worst)

    @property
    def limit(self) -> float | None:
        """The limit of that parameter."""
        worst = self.comparison.worst if self.comparison else None
        return worst.limit.relative if worst else None


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
    session.tell(verdict)
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
                reason = guards.against_the_reference(reference, request.compare)
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
    reason = guards.against_the_evidence(found.evidence, request.strategy, world_size)
    reason = reason or guards.against_an_idle_plant(
        found.evidence, request.plant, request.processes
    )
    if reason is not None:
        return replace(verdict, reason=reason)
    if not found.comparison.same:
        step = first_wrong_step(found.comparison, request.step_count)
        if request.compare == "update":
            step = request.step_count - 1
        reason = guards.against_another_start(reference, found.evidence)
        reason = reason or guards.against_divergence(reference, step)
        if reason is not None:
            return replace(verdict, reason=reason)
        with threads_for(found.comparison.elements):
            return _blamed(_explained(verdict, found, request, around), wrong)
    reason = guards.against_a_pass(found.comparison, found.evidence, lambda: verdict.nearest)
    reason = reason or guards.against_a_hidden_plant(request.plant, request.processes)
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
