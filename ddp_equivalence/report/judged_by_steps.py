"""Judges a step that trains at each step of its optimizer.

A trainer's update of the weights says little about what is wrong: after the first wrong step all
later ones start from wrong weights. So where it differs, its ranks run again, and what they hold is
compared at each step of an optimizer. The first wrong step starts from right weights, and its
gradients are explained as those of any other step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ddp_equivalence.case.build import build_whole_batch
from ddp_equivalence.case.clipping import ClipCall
from ddp_equivalence.case.steps import Compare
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.expectation import expected_of
from ddp_equivalence.diagnosis.kept_elements import kept_elements
from ddp_equivalence.diagnosis.read_order import order_read
from ddp_equivalence.measurement.measure import at_work, measure
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.report.verdict import Verdict
from ddp_equivalence.report.verdict_parts import WrongStep

Judge = Callable[[Request], Verdict]


@dataclass(frozen=True)
class _AtEachStep:
    """What the ranks hold at each step of an optimizer, compared with the reference.

    ``made``: the steps that each rank made. ``expected``: those of the reference. ``clips``: the
    different calls by which torch clipped gradients.
    """

    comparison: Comparison
    made: tuple[int, ...]
    expected: int
    clips: frozenset[ClipCall]

    @property
    def counts_agree(self) -> bool:
        return set(self.made) == {self.expected}

    @property
    def first_wrong(self) -> int | None:
        """The first step that differs, or in which the ranks hold other bits; None if none does."""
        wrong = (
            one.key[0] for one in self.comparison.parameters if not (one.same and one.ranks_agree)
        )
        return min(wrong, default=None)


def will_be_judged_by_steps(request: Request, verdict: Verdict) -> bool:
    """True if each step of an optimizer is looked at where the verdict is "different"."""
    if not request.trains or request.at_each_step or request.in_process or not request.second_look:
        return False
    if verdict.comparison is not None and verdict.comparison.same:  # only the state is wrong
        return False
    return any(one.optimizer_steps for one in verdict.evidence.values())


def judged_by_steps(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """The verdict on a step that trains, with its first wrong step."""
    if verdict.outcome != "different" or not will_be_judged_by_steps(request, verdict):
        return verdict
    try:
        weights = _compared(request, "update")
        if not weights.counts_agree:
            wrong = WrongStep(None, "count", weights.made, weights.expected)
            return _without_cause(verdict, wrong)
        order = _order_read(request, judge)
        if order:
            return _in_order_read(replace(request, read_order=order), judge)
        clipped = _clipped_as_the_step_does(request, weights.clips)
        if clipped is not None:
            request, weights = clipped, _compared(clipped, "update")
        by_gradients = _by_gradients(request, judge)
        if clipped is not None and by_gradients.outcome == "same" and weights.first_wrong is None:
            # The gradients were right before they were clipped, so that clipping hides nothing.
            verdict = judge(clipped)
        if verdict.outcome == "same":
            return verdict
        return _at_first_wrong_step(verdict, by_gradients, weights)
    except RankFailed:  # the verdict on the whole update stands
        return verdict


def _order_read(request: Request, judge: Judge) -> tuple[int, ...]:
    """The order in which the steps read the examples, if it is another than the batch has.

    This comes before any explanation, which takes longer, and which another order would mislead.
    """
    if request.step_count < 2 or request.read_order:
        return ()
    at_each = replace(request, compare="gradients", at_each_step=True, explains=False)
    observed = judge(at_each).observed
    return order_read(observed, _sizes(request), request.case.ranks.world_size)


def _clipped_as_the_step_does(request: Request, clips: frozenset[ClipCall]) -> Request | None:
    """The request with a big batch that is clipped as all calls of the step clip; None if they are
    not alike, or if the user has said how it is clipped.
    """
    training, clip = request.training, next(iter(clips), None)
    if clip is None or clip.most is None or len(clips) > 1:
        return None
    if training.clip is not None or training.is_of_the_user:
        return None
    own = clip.again if clip.by_value else clip.most
    return replace(request, training=replace(training, clip=own))


def gradients_at_each_step(request: Request) -> Comparison | None:
    """The gradients at each step of an optimizer, compared; None if the ranks failed.

    As in ``_by_gradients``, they are compared after clipping if that was not seen.
    """
    with suppress(RankFailed):
        before = _compared(request, "gradients")
        if before.clips or request.training.clip is None:
            return before.comparison
        return _compared(replace(request, after_clipping=True), "gradients").comparison
    return None


def _by_gradients(request: Request, judge: Judge) -> Verdict:
    """The verdict on the gradients at each step.

    They are compared as they were before clipping. Code of the user's own may clip them unseen.
    """
    at_each = replace(request, compare="gradients", at_each_step=True)
    verdict = judge(at_each)
    seen = any(one.clips for one in verdict.evidence.values())
    if verdict.outcome != "different" or request.training.clip is None or seen:
        return verdict
    clipped = judge(replace(at_each, after_clipping=True))
    return clipped if clipped.outcome == "same" else verdict


def _in_order_read(request: Request, judge: Judge) -> Verdict:
    """The verdict on a trainer that reads the examples in another order than the batch has."""
    verdict = judged_by_steps(judge(request), request, judge)
    return replace(verdict, read_order=request.read_order)


def _at_first_wrong_step(verdict: Verdict, by_gradients: Verdict, weights: _AtEachStep) -> Verdict:
    """The gradients at the first wrong step, or the weights after it if its gradients are right."""
    analysis, wrong = by_gradients.analysis, weights.first_wrong
    made, expected = weights.made, weights.expected
    if by_gradients.outcome == "different" and analysis is not None:
        first = analysis.first_wrong_step
        if wrong is None or first <= wrong:
            at = WrongStep(first + 1, "gradients", made, expected)
            of_first = _of_step(by_gradients, first)
            return replace(by_gradients, wrong_step=at, comparison=of_first)
    if by_gradients.outcome == "unknown":
        return verdict
    if wrong is None:
        return _without_cause(verdict, WrongStep(None, "afterwards", made, expected))
    return _without_cause(verdict, WrongStep(wrong + 1, "weights", made, expected))


def _of_step(verdict: Verdict, step: int) -> Comparison | None:
    """The comparison of one step alone: after it the weights are wrong as well."""
    if verdict.comparison is None or verdict.comparison.structure:
        return verdict.comparison
    of_step = tuple(one for one in verdict.comparison.parameters if one.key[0] == step)
    return replace(verdict.comparison, parameters=of_step)


def _without_cause(verdict: Verdict, wrong: WrongStep) -> Verdict:
    """The verdict with no cause: those that fitted the update as a whole are no longer believed."""
    findings = tuple(replace(one, accepted=False) for one in verdict.findings)
    return replace(verdict, wrong_step=wrong, cause=None, findings=findings)


def _compared(request: Request, compare: Compare) -> _AtEachStep:
    """Let the ranks run once more, and compare at each step. Raises RankFailed."""
    at_each = replace(request, compare=compare, at_each_step=True)
    expected = expected_of(at_each)
    sample = kept_elements(expected, request.case.ranks.world_size)
    with at_work(at_each, request.deadline, request.fresh) as ranks:
        measured = measure(ranks, at_each, expected, request.deadline, sample)
    made = (one.optimizer_steps for _, one in sorted(measured.evidence.items()))
    steps = {step for step, _ in expected.reference.expected}
    clips = frozenset(call for one in measured.evidence.values() for call in one.clips)
    return _AtEachStep(measured.comparison, tuple(made), len(steps), clips)


def _sizes(request: Request) -> tuple[int, ...]:
    return build_whole_batch(request.case, request.steps)[1]
