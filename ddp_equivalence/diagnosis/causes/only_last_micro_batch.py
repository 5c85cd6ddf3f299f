"""Only the last micro-batch of every window is in the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction
from ddp_equivalence.diagnosis.lines.of_gradients import backward_count, lines_that_clear
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' last micro-batches, divided by the number of micro-batches or not."""
    parts = view.parts.by_rank
    if parts is None or all(len(of_rank) == 1 for of_rank in parts):
        return ()
    detail = f"1 of the {max(map(len, parts))} micro-batches of the accumulation window"
    last = [
        (torch.stack([gradients[-1] for gradients in by_rank]).mean(0), detail)
        for by_rank in view.micro_batch_gradients
    ]
    undivided = torch.stack([view.examples.gradient(of_rank[-1]) for of_rank in parts]).mean(0)
    last.append((undivided, "not divided by the number of micro-batches"))
    return tuple(Prediction(view.on_every_rank(mean), detail) for mean, detail in last)


def lines(view: View) -> Sequence[PointedLine]:
    """Where gradients are cleared between two micro-batches."""
    calls = view.observed.calls
    count = backward_count(view)
    cleared = lines_that_clear(view)
    if cleared:
        note = f"runs between the {count} backwards, and discards what was added up"
        last = [place.pointed(f"backward, {count} times") for place in calls.backwards[-1:]]
        return in_order(view, *last, cleared[0].pointed(note, True))
    called = [
        place.pointed(f"forward, {len(place.calls)} times")
        for place in calls.places(Kind.FORWARD)[-1:]
    ]
    note = f"backward, only {len(calls.backwards[-1].calls)} times" if calls.backwards else ""
    note = note.replace("only 1 times", "only once")
    if _runs_for_all(view):
        note = f"backward, {count} times; the gradients of the last one are kept"
    return in_order(view, *called, *(place.pointed(note, True) for place in calls.backwards[-1:]))


def fix(view: View) -> str:
    """Clear once."""
    count = backward_count(view)
    if count == 0:
        return "clear gradients once before the window, and add the micro-batches up."
    if lines_that_clear(view):
        return f"clear gradients once before the window, not between its {count} backwards."
    if _runs_for_all(view):
        return f"add up the gradients of all {count} micro-batches; those of the last one are kept."
    return "call backward for every micro-batch of the window, not only for the last one."


def _runs_for_all(view: View) -> bool:
    """True if there is a backward pass for each forward pass."""
    calls = view.observed.calls
    rank = min(calls.by_rank, default=0)
    forwards = sum(call.kind is Kind.FORWARD for call in calls.of(rank))
    return 1 < forwards <= backward_count(view)


HYPOTHESIS = Hypothesis(
    name="only_last_micro_batch",
    sentence="Only the last micro-batch of the accumulation window is in the gradient.",
    look_at="zero_grad inside the loop over micro-batches, or a gradient that is set, not added to",
    predict=predict,
    tell_apart="Use at least two micro-batches with different examples.",
    headline="only the last micro-batch counts",
    lines=lines,
    fix=fix,
)
