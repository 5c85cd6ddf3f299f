"""The gradient of an earlier step or pass was still there when the new one was added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ddp_equivalence.diagnosis.examples_read import passes_of_read_examples
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, WrongFactor
from ddp_equivalence.diagnosis.lines.of_gradients import (
    backward_count,
    lines_of_partial_clears,
    lines_that_clear,
)
from ddp_equivalence.diagnosis.lines.source_tree import at_meeting, meeting_lines
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def predict(view: View) -> Sequence[Prediction]:
    """The gradient of the big batch, plus those of the one, two, ... steps before."""
    earlier = view.examples.earlier_expected
    predictions = []
    for count in range(1, len(earlier) + 1):
        total = view.expected + torch.stack(earlier[-count:]).sum(0)
        detail = "the gradient of the step before is included"
        if count > 1:
            detail = f"the gradients of the {count} steps before are included"
        predictions.append(Prediction(view.on_every_rank(total), detail))
    return (*predictions, *_of_earlier_passes(view))


def _of_earlier_passes(view: View) -> Iterator[Prediction]:
    """The mean of all that the ranks computed, where each went twice over some of its examples, and
    where the later passes alone would have been right.
    """
    if view.observed_gradients is None or not passes_of_read_examples(view):
        return
    if not _later_passes_are_right(view):
        return
    for local in view.local_gradients[:1]:
        mean = local.mean(0)
        if not nearly_equal(mean, view.expected):
            detail = "a backward over some of the same examples came before"
            yield Prediction(view.on_every_rank(mean), detail)


def _later_passes_are_right(view: View) -> bool:
    """True if the big batch has the mean of what ranks computed after their first passes."""
    by_rank = [
        [one.gradient for one in view.observed.backwards(rank)] for rank in range(view.world_size)
    ]
    fewest = min(map(len, by_rank), default=0)
    for first in range(1, fewest):
        later = [one for passes in by_rank for one in passes[first:]]
        known = [one for one in later if one is not None and len(one) == len(view.expected)]
        if len(known) == len(later):
            mean = view.setting.scale * torch.stack(known).sum(0) / view.world_size
            if nearly_equal(mean, view.expected):
                return True
    return False


def factors(view: View) -> Sequence[WrongFactor]:
    """Two: the gradient of the same examples may have been there already."""
    return (WrongFactor(2.0, "the gradient of an earlier pass over the same examples is included"),)


def indication(view: View) -> Indication | None:
    """Counts the calls of backward in the first step."""
    if not view.observed.by_rank or view.setting.step > 0:
        return None
    passes = {rank: len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    most = max(passes.values())
    if most == 1:
        return Indication(False, "backward was called once in this step")
    micro_batches = _micro_batches(view)
    if micro_batches is None:
        return None  # each backward may have been that of another micro-batch
    one_by_one = all(count <= micro_batches[rank] for rank, count in passes.items())
    if one_by_one and not passes_of_read_examples(view):
        return Indication(False, "every backward was that of another micro-batch")
    return Indication(True, f"backward was called {most} times in this step")


def _micro_batches(view: View) -> tuple[int, ...] | None:
    """How many micro-batches each rank has; None if that was neither seen nor is known."""
    parts = view.observed.examples_read
    if parts is None:
        parts = view.parts.by_rank
        if parts is None or all(len(of_rank) == 1 for of_rank in parts):
            return None
    return tuple(map(len, parts))


def lines(view: View) -> Sequence[PointedLine]:
    """The line after which nothing clears the gradients, and the backward that adds to them."""
    calls = view.observed.calls
    missing = "zero_grad()"
    if view.setting.step == 0 and backward_count(view) > 1:
        places = calls.backwards
        partly = lines_of_partial_clears(view)
        if partly:
            note = "adds to what was not cleared"
            return [*partly, *(place.pointed(note) for place in places[-1:])]
        cleared = lines_that_clear(view)
        note = "leaves its gradients" + ("" if cleared else "; nothing clears them")
        first, last = places[0].first, places[-1].calls[-1]
        if meeting_lines(first, last) is not None:
            leaves = places[0].pointed(note, True, missing)
            return at_meeting(leaves, places[-1].pointed("adds to them"), first, last)
        if len(places) == 1:
            return [places[0].pointed(f"runs {backward_count(view)} times; {note}", True, missing)]
        return [places[0].pointed(note, True, missing), places[-1].pointed("adds to them")]
    clearing = _clears_too_little(view)
    note = "adds to gradients that were there already"
    backwards = (place.pointed(note, not clearing) for place in calls.backwards[:1])
    return in_order(view, *clearing, *backwards)


def _clears_too_little(view: View) -> list[PointedLine]:
    """The last call of zero_grad before backward, if it did not clear every gradient."""
    calls = view.observed.calls
    first = min((call.backwards for call in calls.of(0) if call.kind is Kind.BACKWARD), default=0)
    asked = calls.places(Kind.ZERO_GRAD, where=lambda call: call.backwards == first)
    if not asked:
        return []
    cleared = calls.changes(lambda call: call.change is not None and call.change.cleared)
    count = sum(len(place.names) for place in cleared if place.line == asked[-1].line)
    total = len(view.parameters.sample.sizes)
    return (
        [asked[-1].pointed(f"clears {count} of {total} gradients", True)] if count < total else []
    )


def fix(view: View) -> str:
    """Clear gradients."""
    if view.setting.step == 0 and backward_count(view) > 1:
        if lines_of_partial_clears(view):
            return "clear the gradients of all parameters there, not only of some."
        return "clear the gradients (zero_grad) between these two backward passes."
    return "clear the gradients of all parameters (zero_grad) before the first backward of a step."


HYPOTHESIS = Hypothesis(
    name="stale_gradient_added",
    sentence="An earlier gradient had not been cleared when the new one was added to it.",
    look_at="zero_grad(): it must run before the backward of every step, also for parameters that "
    "no optimizer holds",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Take two steps on different examples, with another world size than 2.",
    headline="an earlier gradient was not cleared",
    lines=lines,
    fix=fix,
)
