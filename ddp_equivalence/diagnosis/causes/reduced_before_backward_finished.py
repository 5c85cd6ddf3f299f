"""Gradients were reduced while backward was still adding to them."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes import bucket_not_reduced
from ddp_equivalence.diagnosis.causes.accumulation_boundary_off_by_one import reduced_early
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, indication_if
from ddp_equivalence.diagnosis.lines.lines_of_wrapping import sharded_names
from ddp_equivalence.diagnosis.lines.source_tree import at_meeting
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def predict(view: View) -> Sequence[Prediction]:
    """Some parameters, or the later micro-batches, were not reduced."""
    return (*bucket_not_reduced.kept_local_in_part(view), *reduced_early(view))


def indication(view: View) -> Indication | None:
    """Looks at whether the step is repeatable, and at when its collectives were issued."""
    if view.observed.left_other_bits:
        return Indication(True, "the second run of the step left other bits than the first")
    if view.observed.wrappers:
        because = "DistributedDataParallel waits for backward, and a second run left the same bits"
        return Indication(False, because)
    if sharded_names(view):
        because = "fully_shard reduces during backward and waits; a second run left the same bits"
        return Indication(False, because)
    return indication_if(
        _collectives_ran_inside_backward(view),
        "collectives were issued while backward was running, and not by DistributedDataParallel",
        "no collective was issued while backward was running",
    )


def _collectives_ran_inside_backward(view: View) -> bool | None:
    """True if every rank issued a collective inside a backward; None if that is not known."""
    if not view.observed.by_rank:
        return None
    inside_by_rank = []
    for observation in view.observed.by_rank.values():
        issued = [call.issued for call in observation.backwards]
        if not issued or any(None in counts for counts in issued):
            return None
        inside_by_rank.append(sum((end or 0) - (begin or 0) for begin, end in issued))
    return all(inside > 0 for inside in inside_by_rank)


def lines(view: View) -> Sequence[PointedLine]:
    """The collective that came too early, and the backward pass that added more."""
    calls = view.observed.calls
    inside = calls.places(Kind.COLLECTIVE, where=lambda call: call.in_backward)
    if inside:
        hooks = [place.pointed() for place in calls.places(Kind.TENSOR_HOOK)[:1]]
        note = f"{len(inside[-1].calls)} calls while backward was running"
        return [*hooks, inside[-1].pointed(note, is_fault=True)]
    last = max((call.backwards for call in calls.of(0)), default=0)
    early = [place for place in calls.reductions if place.first.backwards < last]
    late = calls.backwards[-1:]
    note = "ran before the last backward"
    if early and late:
        first = early[0].pointed(note, is_fault=True)
        return at_meeting(first, late[0].pointed(), early[0].first, late[0].calls[-1])
    return [
        *(place.pointed(note, is_fault=True) for place in early[:1]),
        *map(CallSite.pointed, late),
    ]


def fix(view: View) -> str:
    """Reduce later."""
    return "reduce once after the last backward has returned, and wait for it."


HYPOTHESIS = Hypothesis(
    name="reduced_before_backward_finished",
    sentence="Gradients were reduced before backward had finished adding to them.",
    look_at="asynchronous collectives in hooks, streams that are not waited for, and parameters "
    "that get their gradient in several places (tied weights, micro-batches)",
    predict=predict,
    indication=indication,
    tell_apart="Run the step again: a race seldom leaves the same bits twice.",
    headline="gradients are reduced before backward ends",
    lines=lines,
    fix=fix,
)
