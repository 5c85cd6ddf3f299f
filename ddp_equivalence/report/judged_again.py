"""Verdicts on steps that one judgement does not show as they are, so that they are judged again.

A step with autocast, or with float32 inside float64, is judged in two precisions. A step that
differs and drops something on a GPU is judged without dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ddp_equivalence.diagnosis import masks, precision
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.measurement.measure import where_in_float32
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.report.judged_by_steps import gradients_at_each_step
from ddp_equivalence.report.verdict import Verdict

Judge = Callable[[Request], Verdict]


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
    on_a_gpu = masks.are_drawn_on_a_gpu(request) and not verdict.numbers_are_known
    only_masks = request.is_the_users_own and verdict.causes == masks.ONLY_MASKS
    return (on_a_gpu or only_masks) and masks.drops_something(request)


def _also_without_dropout(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """Judge a step whose masks cannot be predicted without them, and name what is left.

    Without dropout, the masks cannot hide another cause. They are believed to be the only cause if
    the step is then right, which is then the verdict on a user's own step.
    """
    rejected = tuple(replace(finding, accepted=False) for finding in verdict.findings)
    without = masks.request_without_masks(request)
    again = None if without is None else judge(without)
    findings = rejected
    is_right = again is not None and again.outcome == "same" and request.is_the_users_own
    if again is not None and is_right and not masks.are_the_same_on_all_ranks(verdict.view):
        return replace(again, case=verdict.case, masks_unpredictable=True)
    if verdict.causes == masks.ONLY_MASKS and (again is None or again.causes == verdict.causes):
        return verdict
    if again is not None and _is_right(again):
        finding = masks.finding_of_masks(verdict.view)
        findings = (finding, *(one for one in rejected if one.cause != finding.cause))
    elif again is not None and again.outcome == "different":
        findings = masks.findings_beside_masks(again.findings, verdict.view)
    best = findings[0] if findings else None
    return replace(
        verdict,
        findings=findings,
        cause=best.cause if best is not None and best.accepted else None,
        masks_unpredictable=True,
        without_dropout=again,
    )


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
    different = replace(different, float32_at=where_in_float32(request))
    own = precision.in_own_precision(request) if different.float32_at else None
    if own is None:
        return different
    again = judge(own)
    if again.outcome == "same":
        return replace(again, other_precision=different)
    return replace(different, other_precision=again)


def _has_the_size_of_float32(verdict: Verdict, request: Request) -> bool:
    """True if the difference could have been left by rounding in float32.

    What the weights say depends on the optimizer: the first step of Adam nearly divides each
    gradient by its own size, and leaves little of its rounding, and little of a wrong factor. So
    where an optimizer steps, its gradients are asked.
    """
    steps = any(one.optimizer_steps for one in verdict.evidence.values())
    if not request.trains or request.training.is_plain_sgd or request.at_each_step or not steps:
        return precision.has_the_size_of_float32(verdict.comparison)
    if not precision.is_at_most_float32(verdict.comparison):
        return False
    return precision.has_the_size_of_float32(gradients_at_each_step(request))


def _also_in_own_precision(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """Judge a step that enters autocast again, in the precision in which the user builds the model.

    Autocast does nothing in float64.
    """
    if verdict.outcome != "same" or not verdict.autocast or verdict.other_precision is not None:
        return verdict
    own = precision.in_own_precision(request)
    if own is None:
        return verdict
    again = judge(own)
    if again.outcome == "same":
        return replace(verdict, other_precision=again)
    return replace(again, other_precision=verdict)


def _also_in_float64(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """Judge a step with autocast in float64 as well, where it must be the same, too.

    The limits of autocast's precision are wide, also for parameters that it never touches.
    """
    if verdict.outcome != "same" or verdict.autocast is None or verdict.is_in_float64:
        return verdict
    if verdict.why_not_float64:
        return verdict
    in_float64 = precision.in_float64(request)
    if in_float64 is None:
        return verdict
    again = judge(in_float64)
    if again.outcome != "different" or precision.has_the_size_of_float32(again.comparison):
        return replace(verdict, other_precision=again)
    return replace(again, other_precision=verdict)
