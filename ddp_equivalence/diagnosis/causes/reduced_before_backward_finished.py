"""Gradients were reduced while backward was still adding to them."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.causes import bucket_not_reduced
from ddp_equivalence.diagnosis.causes.accumulation_boundary_off_by_one import reduced_early
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    ways = list(bucket_not_reduced.predict(view))
    ways += [
        Way(predicted, f"after micro-batch {number} of {count}")
        for number, count, predicted in reduced_early(view)
    ]
    return tuple(ways)


def during_backward(view: View) -> bool | None:
    """True if collectives ran inside a backward and none after the last one, without DDP."""
    if not view.observed or indications.wrappers(view):
        return None
    found = []
    for seen in view.observed.values():
        spans = [one.issued for one in seen.backwards]
        if not spans or any(None in span for span in spans):
            return None
        inside = sum((end or 0) - (begin or 0) for begin, end in spans)
        found.append(inside > 0)
    return all(found)


def sign(view: View) -> Sign | None:
    if view.unrepeatable:
        return Sign(True, "the same step left other bits when it ran again")
    if indications.wrappers(view):
        return Sign(
            False, "DistributedDataParallel waits for backward, and a second run left the same bits"
        )
    return indications.only_if(
        during_backward(view),
        "collectives were issued while backward was running, by no DistributedDataParallel",
        "no collective was issued while backward was running",
    )


HYPOTHESIS = Hypothesis(
    name="reduced_before_backward_finished",
    sentence="Gradients were reduced before backward had finished adding to them.",
    look_at="asynchronous collectives in hooks, streams that are not waited for, and parameters "
    "that get their gradient in several places (tied weights, micro-batches)",
    predict=predict,
    sign=sign,
    tell_apart="a second run: a race seldom leaves the same bits twice",
)
