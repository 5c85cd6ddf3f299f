"""Verdicts on steps that one judgement does not show as they are, so that they are judged again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, isclose

from ddp_equivalence.case.build import build_model, build_whole_batch, trains_with_dropout
from ddp_equivalence.case.training import ClipCall, Compare, GradientKey, Settings
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis import draws, localisation
from ddp_equivalence.diagnosis.causes import CAUSE_OF
from ddp_equivalence.diagnosis.examples_read import order_read
from ddp_equivalence.diagnosis.setting import REDUCING
from ddp_equivalence.diagnosis.shares import kept_elements
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.diagnosis.view import expected_of
from ddp_equivalence.measurement.calls import Contents, Kind
from ddp_equivalence.measurement.measure import at_work, measure, where_in_float32
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.report.verdict import OtherSetting, Verdict, WrongStep

# Judges a step that trains at each step of its optimizer.
#
# A trainer's update of the weights says little about what is wrong: after the first wrong step
# all later ones start from wrong weights. So where it differs, its ranks run again, and what they
# hold is compared at each step of an optimizer. The first wrong step starts from right weights,
# and its gradients are explained as those of any other step.

Judge = Callable[[Request], Verdict]

SAME_SETTING = 1e-9
"""Learning rates that differ by less, relative to the larger one, are the same: a schedule may
compute them in another order, with a few rounding errors of 1e-16 in each step."""


@dataclass(frozen=True)
class _AtEachStep:
    """The comparison of the ranks with the reference at each step of an optimizer.

    ``made``: the steps that each rank made. ``expected``: those of the reference. ``clips``: the
    different calls by which torch clipped gradients. ``steps_copies``: an optimizer stepped copies
    of the parameters. ``settings``: by rank, with which optimizers stepped each parameter, and
    ``of_reference``, with which those of the reference did.
    """

    comparison: Comparison
    made: tuple[int, ...]
    expected: int
    clips: frozenset[ClipCall]
    steps_copies: bool
    settings: Mapping[int, Mapping[GradientKey, Settings]]
    of_reference: Mapping[GradientKey, Settings]

    @property
    def counts_agree(self) -> bool:
        return set(self.made) == {self.expected}

    def other_settings(self, step: int) -> tuple[OtherSetting, ...] | None:
        """The settings in this step of the first rank of which some are not those of the reference;
        None if they are not known.
        """
        right = {name: one for (number, name), one in self.of_reference.items() if number == step}
        if not right or not any(self.settings.values()):
            return None
        for rank, own in sorted(self.settings.items()):
            names: dict[str, list[str]] = {}
            for name, theirs in right.items():
                mine = own.get((step, name), {})
                for option in (one for one in theirs if one in mine):
                    if not _is_same(mine[option], theirs[option]):
                        here, there = (_shown(one[option]) for one in (mine, theirs))
                        on = f" on rank {rank}" if rank else ""
                        what = f"{option} is {here}{on}, and {there} in the reference"
                        names.setdefault(what, []).append(name)
            if names:
                every = len(right)
                most_first = sorted(names.items(), key=lambda one: -len(one[1]))
                return tuple(
                    (what, tuple(of) if len(of) < every else ()) for what, of in most_first
                )
        return ()

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
    if not request.by_steps:
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
        by_gradients = _by_gradients(request, judge, weights.first_wrong)
        is_left_over = weights.steps_copies or _reduces_inside_a_step(by_gradients)
        if is_left_over:
            as_a_whole = judge(replace(request, by_steps=False))
            if not _are_reduced(by_gradients) or _is_shown(as_a_whole):
                return as_a_whole  # .grad may be no more than left over
        if clipped is not None and by_gradients.outcome == "same" and weights.first_wrong is None:
            # The gradients were right before they were clipped, so that clipping hides nothing.
            verdict = judge(clipped)
        if verdict.outcome == "same":
            return verdict
        return _at_first_wrong_step(verdict, by_gradients, weights)
    except RankFailed:  # the verdict on the whole update stands
        return verdict


def _are_reduced(by_gradients: Verdict) -> bool:
    """True if the gradients differ from those of the big batch, and are the same on all ranks."""
    found = by_gradients.comparison
    return by_gradients.outcome == "different" and found is not None and found.ranks_agree


def _is_shown(verdict: Verdict) -> bool:
    """True if a line was seen to make another value than on one rank."""
    found = verdict.localisation.whereabouts
    return found is not None and any(one.is_fault for one in found.lines)


def _reduces_inside_a_step(by_gradients: Verdict) -> bool:
    """True if an optimizer reduced copies of gradients inside its step, and may have used these."""
    for seen in by_gradients.observed.values():
        is_inside = False
        for call in seen.calls:
            if call.kind in (Kind.OPTIMIZER_STEP, Kind.BACKWARD):
                is_inside = call.kind is Kind.OPTIMIZER_STEP
            reduced = call.collective if is_inside else None
            if reduced is None or reduced.op not in REDUCING:
                continue
            if reduced.contents is Contents.COPIES_OF_GRADIENTS or reduced.parts_of:
                return True
    return False


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


def _by_gradients(request: Request, judge: Judge, wrong: int | None) -> Verdict:
    """The verdict on the gradients at each step.

    They are compared as they were before clipping. Code of the user's own may clip them unseen, as
    it does if one rank with the whole batch is right only after clipping. If they are right until
    the step after which weights are ``wrong``, these are clipped otherwise.
    """
    at_each = replace(request, compare="gradients", at_each_step=True)
    verdict = judge(at_each)
    seen = any(one.clips for one in verdict.evidence.values())
    is_lost = any(one.changed_after_clipping for one in verdict.evidence.values())
    if request.training.clip is None:
        return verdict
    if seen and wrong is not None and _first_wrong(verdict) > wrong:
        after = replace(at_each, after_clipping=True)
        if _first_wrong(judge(replace(after, explains=False))) > wrong:
            return verdict
        return judge(after)
    if verdict.outcome != "different" or (seen and not is_lost):
        return verdict
    clipped = judge(replace(at_each, after_clipping=True))
    if is_lost:  # the gradients before clipping are not to be had
        return clipped
    beside = None if clipped.analysis is None else clipped.analysis.beside
    is_right_alone = beside is not None and beside.is_right_alone
    return clipped if clipped.outcome == "same" or is_right_alone else verdict


def _first_wrong(verdict: Verdict) -> float:
    """The first step with wrong gradients; infinity if none has any, or it is not known."""
    is_known = verdict.outcome == "different" and verdict.analysis is not None
    return verdict.analysis.first_wrong_step if is_known and verdict.analysis else inf


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
    other = weights.other_settings(wrong)
    return _without_cause(verdict, WrongStep(wrong + 1, "weights", made, expected, other))


def _of_step(verdict: Verdict, step: int) -> Comparison | None:
    """The comparison of one step alone: after it the weights are wrong as well."""
    if verdict.comparison is None or verdict.comparison.structure:
        return verdict.comparison
    of_step = tuple(one for one in verdict.comparison.parameters if one.key[0] == step)
    return replace(verdict.comparison, parameters=of_step)


def _without_cause(verdict: Verdict, wrong: WrongStep) -> Verdict:
    """The verdict with no cause: those that fitted the update as a whole are no longer believed,
    but for one that concerns the optimizer alone.
    """
    if verdict.cause is not None and CAUSE_OF[verdict.cause].of_optimizer:
        return replace(verdict, wrong_step=replace(wrong, is_named=True))
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
    return _AtEachStep(
        measured.comparison,
        tuple(made),
        len(steps),
        clips,
        steps_copies=any(one.steps_copies for one in measured.evidence.values()),
        settings={rank: one.settings for rank, one in measured.evidence.items()},
        of_reference=expected.reference.settings,
    )


def _is_same(one: object, other: object) -> bool:
    """True if two settings are the same, up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=SAME_SETTING)
    return one == other


def _shown(setting: object) -> str:
    return text_of(setting, ".6g") if isinstance(setting, float) else str(setting)


def _sizes(request: Request) -> tuple[int, ...]:
    return build_whole_batch(request.case, request.steps)[1]


# A step with autocast, or with float32 inside float64, is judged in two precisions. A step that
# differs and drops something on a GPU is judged without dropout.


def judged_again(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """The verdict on a request, after all further judgements that it takes."""
    if verdict.outcome == "different" and _is_judged_without_dropout(verdict, request):
        return _also_without_dropout(verdict, request, judge)
    if request.is_cast_to_float64:
        return _also_in_own_precision(verdict, request, judge)
    return _also_in_float64(verdict, request, judge)


def _is_judged_without_dropout(verdict: Verdict, request: Request) -> bool:
    """True if the masks of the ranks cannot be predicted, or if they are the only difference of a
    user's own step, which the big batch cannot be given in several steps and in a large model.
    """
    on_a_gpu = request.lane.device_type != "cpu" and not verdict.numbers_are_known
    only_masks = request.is_the_users_own and verdict.causes == draws.ONLY_MASKS
    return (on_a_gpu or only_masks) and trains_with_dropout(build_model(request.case))


def _also_without_dropout(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """Judge a step whose masks cannot be predicted without them, and name what is left.

    Without dropout, the masks cannot hide another cause. They are believed to be the only cause if
    the step is then right, which is then the verdict on a user's own step.
    """
    rejected = tuple(replace(finding, accepted=False) for finding in verdict.findings)
    without = draws.request_without_masks(request)
    again = None if without is None else judge(without)
    findings = rejected
    is_right = again is not None and again.outcome == "same" and request.is_the_users_own
    if again is not None and is_right and not draws.are_the_same_on_all_ranks(verdict.view):
        again = replace(again, case=verdict.case)
        return again.with_again(masks_unpredictable=True)
    if verdict.causes == draws.ONLY_MASKS and (again is None or again.causes == verdict.causes):
        return verdict
    if again is not None and _is_right(again):
        finding = draws.finding_of_masks(verdict.view)
        findings = (finding, *(one for one in rejected if one.cause != finding.cause))
    elif again is not None and again.outcome == "different":
        findings = draws.findings_beside_masks(again.findings, verdict.view)
    best = findings[0] if findings else None
    cause = best.cause if best is not None and best.accepted else None
    verdict = replace(verdict, findings=findings, cause=cause)
    return verdict.with_again(masks_unpredictable=True, without_dropout=again)


def _is_right(verdict: Verdict) -> bool:
    """True if nothing differs. A planted fault may be one that only the masks can show."""
    hidden = verdict.unknown_because is UnknownBecause.PLANTED_FAULT_CANNOT_SHOW
    return verdict.outcome == "same" or hidden


def unless_right_in_own_precision(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """The verdict on a difference in float64 that nothing has explained yet.

    A step that computes in float32 inside float64 is off by the rounding of float32 there, which is
    no fault. If the difference has that size, the ranks look where they compute in float32, and the
    step is judged in the precision in which the user builds the model. It is the same if it is the
    same there. This comes before any explanation, which takes much longer.
    """
    different = replace(verdict, outcome="different")
    if not request.is_cast_to_float64 or not _has_the_size_of_float32(verdict, request):
        return different
    different = different.with_again(float32_at=where_in_float32(request))
    own = localisation.in_own_precision(request) if different.again.float32_at else None
    if own is None:
        return different
    again = judge(own)
    if again.outcome == "same":
        return again.with_again(other_precision=different)
    return different.with_again(other_precision=again)


def _has_the_size_of_float32(verdict: Verdict, request: Request) -> bool:
    """True if the difference could have been left by rounding in float32.

    What the weights say depends on the optimizer: the first step of Adam nearly divides each
    gradient by its own size, and leaves little of its rounding, and little of a wrong factor. So
    where an optimizer steps, its gradients are asked.
    """
    steps = any(one.optimizer_steps for one in verdict.evidence.values())
    if not request.trains or request.training.is_plain_sgd or request.at_each_step or not steps:
        return localisation.has_the_size_of_float32(verdict.comparison)
    if not localisation.is_at_most_float32(verdict.comparison):
        return False
    return localisation.has_the_size_of_float32(gradients_at_each_step(request))


def _also_in_own_precision(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """Judge a step that enters autocast again, in the precision in which the user builds the model.

    Autocast does nothing in float64.
    """
    if (
        verdict.outcome != "same"
        or not verdict.autocast
        or verdict.again.other_precision is not None
    ):
        return verdict
    own = localisation.in_own_precision(request)
    if own is None:
        return verdict
    again = judge(own)
    if again.outcome == "same":
        return verdict.with_again(other_precision=again)
    return again.with_again(other_precision=verdict)


def _also_in_float64(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """Judge a step with autocast in float64 as well, where it must be the same, too.

    The limits of autocast's precision are wide, also for parameters that it never touches.
    """
    if verdict.outcome != "same" or verdict.autocast is None or verdict.is_in_float64:
        return verdict
    if verdict.why_not_float64:
        return verdict
    in_float64 = localisation.in_float64(request)
    if in_float64 is None:
        return verdict
    again = judge(in_float64)
    if again.outcome != "different" or localisation.has_the_size_of_float32(again.comparison):
        return verdict.with_again(other_precision=again)
    return again.with_again(other_precision=verdict)


# A step with libraries that is not the same is judged again on new ranks: libraries keep state.
#
# What an earlier check has left in a library, in the same processes, may change a verdict. New
# ranks have nothing of an earlier check.


def judged_on_fresh_ranks(
    verdict: Verdict, request: Request, judge: Callable[[Request], Verdict]
) -> Verdict:
    """The verdict, or that of new ranks if libraries of an earlier check may have changed it."""
    libraries = libraries_of_earlier_checks(verdict)
    if verdict.outcome == "same" or request.fresh or request.in_process or not libraries:
        return verdict
    if verdict.unknown_because is UnknownBecause.LIMIT_ABOVE_SIGNAL:
        return verdict  # nothing differed, and the limits follow from the reference
    again = judge(replace(request, fresh=True))
    return again.with_again(on_used_ranks=verdict.outcome, libraries_kept=libraries)


def libraries_of_earlier_checks(verdict: Verdict) -> tuple[str, ...]:
    """The libraries that earlier checks had imported on the ranks of this one."""
    if verdict.failure is not None:
        return verdict.failure.libraries
    return tuple(sorted({name for one in verdict.evidence.values() for name in one.libraries}))
