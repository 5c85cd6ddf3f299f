"""check(): case and step in, verdict out; assert_equivalent() raises, once, at the edge."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ddp_equivalence import guards, session
from ddp_equivalence.building import Steps, in_step
from ddp_equivalence.case import Case, name_of
from ddp_equivalence.comparison import Comparator, Comparison
from ddp_equivalence.diagnoses.hypothesis import View
from ddp_equivalence.diagnosis import (
    Finding,
    NearestFault,
    diagnose,
    diagnose_by_factor,
    first_wrong_step,
    nearest_fault,
    view_of,
)
from ddp_equivalence.errors import (
    BadCase,
    NotEquivalent,
    NothingCompared,
    RankFailed,
    RanksTimedOut,
)
from ddp_equivalence.facts import Indices, facts_of
from ddp_equivalence.gradients import RawChunk
from ddp_equivalence.rank_work import Evidence, Step, Work, run
from ddp_equivalence.ranks import carry
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.server import start_server
from ddp_equivalence.ranks.warm import warm_ranks
from ddp_equivalence.reference import Compare, Reference, big_batch
from ddp_equivalence.report import render
from ddp_equivalence.request import Request, read_request, repeat_line
from ddp_equivalence.shares import Shares, shares_of
from ddp_equivalence.tolerance import Tolerance

Outcome = Literal["same", "different", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """What a check found. ``print(verdict)`` is the report that a failing test shows.

    ``outcome``: "same", "different" or "unknown" (then ``reason`` says why nothing was shown).
    ``cause``: the public name of the accepted explanation, or None. ``findings``: all explanations
    considered, best first. ``shares``: how often each example entered what each rank holds.
    ``comparison``: per parameter and rank. ``evidence``: rank -> what really ran.
    ``failure``: the ranks' failure, if they failed. ``output``: rank -> what it printed.
    """

    case: Case
    subject: str
    promise: str
    lane: Lane
    outcome: Outcome
    reason: str = ""
    cause: str | None = None
    findings: tuple[Finding, ...] = ()
    shares: Shares | None = None
    comparison: Comparison | None = None
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    nearest: NearestFault | None = None
    examples: tuple[int, ...] = ()
    compare: Compare = "gradients"
    lr: float = 0.1
    failure: RankFailed | None = None
    output: Mapping[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    repeat: str = ""

    def __str__(self) -> str:
        return render(self)

    @property
    def error(self) -> float | None:
        """||measured - big batch|| / ||big batch|| of the parameter nearest to, or furthest
        beyond, its limit, on its worst rank.
        """
        worst = self.comparison.worst if self.comparison else None
        return worst.error if worst else None

    @property
    def floor(self) -> float | None:
        """What rounding alone does to that parameter on one device."""
        worst = self.comparison.worst if self.comparison else None
        return worst.limit.floor if worst else None

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
    fresh_ranks: bool | None = None,
) -> Verdict:
    """Compare what ``step`` leaves on every rank with one big batch.

    ``step``: (model, shard, rank) -> None or {name: tensor}; or a name of
    ``ddp_equivalence.strategies``. ``compare="gradients"`` calls it once for every big batch.
    ``compare="update"`` compares the change of the weights: a step of your own is called once, with
    the examples of all ``steps`` big batches joined, and leaves the trained weights in the model or
    returns them by name; the reference takes as many plain SGD steps with ``lr``.
    ``steps``: how many big batches the batch is read as, or the examples of each.
    ``backend``: "auto" (NCCL with a GPU for each rank, else gloo on the CPU), "gloo", "gloo_cuda",
    "nccl", "nccl2", "nccl-legacy". ``deadline``: seconds for the ranks' work.
    ``fresh_ranks``: new processes for this check instead of warm ones.

    Raises BadCase if the case or an argument cannot be right; never for what the step does.
    """
    request = read_request(case, step, compare, lr, steps, backend, deadline, fresh_ranks)
    started = time.monotonic()
    start_server()  # imports while the reference is computed
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
    fresh_ranks: bool | None = None,
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
        fresh_ranks=fresh_ranks,
    )
    raise_unless_same(verdict)
    return verdict


def raise_unless_same(verdict: Verdict) -> None:
    """The edge: the one place where a verdict becomes an exception."""
    __tracebackhide__ = True
    if verdict.outcome == "different":
        raise NotEquivalent(verdict)
    if verdict.failure is not None:
        raise type(verdict.failure)(str(verdict), verdict.failure.ends)
    if verdict.outcome == "unknown":
        raise NothingCompared(verdict)


def _judge(request: Request) -> Verdict:
    case = request.case
    reference = _reference(request)
    verdict = Verdict(
        case=case,
        subject=name_of(request.step),
        promise=request.strategy.promise if request.strategy else "",
        lane=request.lane,
        outcome="unknown",
        examples=reference.examples,
        compare=request.compare,
        lr=request.lr,
    )
    reason = guards.against_the_reference(reference, request.compare)
    if reason is not None:
        return replace(verdict, reason=reason)
    view = _view(request, reference)
    answer = _run(request, reference, keep=view is not None)
    if answer.failure is not None:
        reason = "ranks timed out" if isinstance(answer.failure, RanksTimedOut) else "a rank failed"
        return replace(
            verdict,
            reason=reason,
            failure=answer.failure,
            output={end.rank: end.output for end in answer.failure.ends},
        )
    verdict = replace(
        verdict,
        comparison=answer.comparison,
        evidence=answer.evidence,
        output=answer.output,
        nearest=nearest_fault(view) if view is not None else None,
    )
    world_size = request.processes.world_size
    reason = guards.against_the_evidence(answer.evidence, request.strategy, world_size)
    if reason is not None:
        return replace(verdict, reason=reason)
    if not answer.comparison.same:
        reason = guards.against_another_start(reference, answer.evidence)
        if reason is not None:
            return replace(verdict, reason=reason)
        wrong = first_wrong_step(answer.comparison, request.step_count)
        if view is not None and wrong > 0:
            view = _view(request, reference, wrong)
        return _explained(verdict, view, answer, request, wrong)
    reason = guards.against_a_pass(answer.comparison, answer.evidence, verdict.nearest)
    return replace(verdict, reason=reason or "", outcome="unknown" if reason else "same")


def _explained(
    verdict: Verdict, view: View | None, answer: _Answer, request: Request, wrong: int
) -> Verdict:
    """Name the cause, if one of the known explanations fits."""
    shares, world_size = None, request.case.ranks.world_size
    findings: tuple[Finding, ...]
    if answer.comparison.structure:
        findings = ()  # what is missing or of another shape leaves nothing to fit
    elif view is None:
        findings = diagnose_by_factor(answer.comparison, world_size)
    else:
        names = {in_step(name, wrong, request.step_count): name for name in view.shapes}
        measured = {
            rank: {names[name]: value for name, value in found.items() if name in names}
            for rank, found in answer.measured.items()
        }
        findings = diagnose(view, measured, answer.comparison)
        shares = shares_of(view, measured)
    cause = findings[0].cause if findings and findings[0].accepted else None
    return replace(verdict, outcome="different", cause=cause, findings=findings, shares=shares)


@dataclass
class _Answer:
    """What came back from the ranks."""

    comparison: Comparison
    evidence: dict[int, Evidence]
    measured: dict[int, dict[str, Tensor | None]]
    output: dict[int, str]
    failure: RankFailed | None = None


def _run(request: Request, reference: Reference, keep: bool) -> _Answer:
    """Compare while gradients arrive: nothing is held but sums, unless ``keep``."""
    case = request.case
    tolerance = Tolerance(reference.dtype, exact=case.exact)
    stream = Comparator(reference.expected, reference.described, tolerance, reference.noise)
    evidence: dict[int, Evidence] = {}
    measured: dict[int, dict[str, Tensor | None]] = {}
    output: dict[int, str] = {}
    work = Work(case, request.step, request.compare, request.lr, request.steps)
    layout = request.processes
    try:
        by_name = case.is_catalogue and isinstance(request.step, str)
        message = carry.dumps(run, work, foreign=not by_name)
    except Exception as error:
        right = f"a function that cloudpickle can carry to the ranks; {error}"
        raise BadCase("step", name_of(request.step), right) from error
    timeout = max(1.0, request.deadline / 2)  # a collective gives up before its case does
    try:
        with warm_ranks().acquire(layout, request.lane, timeout, request.fresh) as ranks:
            ranks.submit(message)
            for rank, result in ranks.collect(request.deadline):
                if isinstance(result, Evidence):
                    evidence[rank] = result
                    stream.begin(rank, result.gradients)
                    if keep:
                        measured[rank] = {}
                    continue
                assert isinstance(result, list)
                for raw in result:
                    assert isinstance(raw, RawChunk)
                    chunk = raw.open()
                    stream.add(rank, chunk)
                    if keep:
                        _keep(measured[rank], chunk.name, chunk.values)
            output = {rank: ranks.output(rank) for rank in range(layout.world_size)}
    except RankFailed as error:
        return _Answer(Comparison((), (), (), 0), evidence, {}, output, failure=error)
    for rank, found in measured.items():
        for name, one in evidence[rank].gradients.items():
            value = found.get(name)
            if one is not None:
                found[name] = value.reshape(one.shape) if value is not None else None
    in_order = dict(sorted(evidence.items()))  # ranks report as they come
    return _Answer(stream.finish(), in_order, measured, output)


def _keep(kept: dict[str, Tensor | None], name: str, values: Tensor) -> None:
    before = kept.get(name)
    kept[name] = values if before is None else torch.cat([before, values])


def _reference(request: Request) -> Reference:
    case = request.case
    if not case.is_catalogue:
        return big_batch(case, request.compare, request.lr, request.steps)
    return _catalogue_reference(_alone(case), request.compare, request.lr, request.steps)


def _alone(case: Case) -> Case:
    """The case without its ranks. Of a catalogue case only the batch depends on layout and shards:
    through its size and, where the last shard is padded, its targets.
    """
    if case.shards == "no_valid_token":
        return case
    return replace(case, layout="1x1", shards="equal", examples=case.catalogue_examples)


@lru_cache(maxsize=128)
def _catalogue_reference(case: Case, compare: Compare, lr: float, steps: Steps) -> Reference:
    return big_batch(case, compare, lr, steps)


def _view(request: Request, reference: Reference, step: int = 0) -> View | None:
    case = request.case
    if request.compare == "update" and request.step_count > 1:
        return None  # after the first step the weights of a wrong run are its own
    parts: tuple[tuple[Indices, ...], ...] | None = None
    if request.strategy is not None and case.is_catalogue:
        parts = request.strategy.contributions(facts_of(case, request.steps)[step])
    scale = -request.lr if request.compare == "update" else 1.0
    known = None
    if case.is_catalogue:
        known = _known_gradients(_alone(case), request.steps, step, request.lr, scale)
    return view_of(
        case,
        reference,
        ranks=tuple(range(request.processes.world_size)),
        parts=parts,
        steps=request.steps,
        step=step,
        lr=request.lr,
        scale=scale,
        on_cpu=request.lane.device_type == "cpu",
        known=known,
    )


@lru_cache(maxsize=256)
def _known_gradients(
    case: Case, steps: Steps, step: int, lr: float, scale: float
) -> dict[Indices, Tensor]:
    """Filled by the views of one catalogue case: strategies meet the same parts of it again."""
    return {}
