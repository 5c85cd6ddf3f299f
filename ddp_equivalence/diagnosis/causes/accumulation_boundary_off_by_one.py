"""Gradients were reduced at another micro-batch than the last one of the window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.of_gradients import backward_count, lines_that_clear
from ddp_equivalence.diagnosis.lines.of_reduction import by_hand, lines_of_no_sync
from ddp_equivalence.diagnosis.lines.words import count_text, in_order
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def predict(view: View) -> Sequence[Prediction]:
    """The reduction came after an earlier micro-batch, or the window lost one of them.

    One rank reduces nothing, so that no boundary can be wrong there.
    """
    if view.world_size == 1:
        return ()
    early = [replace(one, detail=f"reduced {one.detail}") for one in reduced_early(view)]
    return (*early, *_lost_a_micro_batch(view))


def reduced_early(view: View) -> Iterator[Prediction]:
    """The micro-batches up to the reduction are averaged, and those after it stay local."""
    if not view.setting.every_rank_reports or view.world_size == 1:
        return  # one rank reduces nothing
    for gradients in _stacked_micro_batches(view):
        count = gradients.shape[1]
        for end in range(1, count):
            held = gradients[:, :end].sum(1).mean(0) + gradients[:, end:].sum(1)
            yield Prediction(view.on_reporting_ranks(held), f"after micro-batch {end} of {count}")


def _lost_a_micro_batch(view: View) -> Iterator[Prediction]:
    """The first or the last micro-batch of the window is missing."""
    for gradients in _stacked_micro_batches(view):
        count = gradients.shape[1]
        if count < 3:
            continue  # Of two micro-batches only one would be left, which is another cause.
        for missing in (0, count - 1):
            held = (gradients.sum(1) - gradients[:, missing]).mean(0)
            detail = f"without micro-batch {missing + 1} of {count}"
            yield Prediction(view.on_every_rank(held), detail)


def _stacked_micro_batches(view: View) -> Iterator[Tensor]:
    """All candidates for their gradients, each (world size, micro-batches, elements).

    None unless every rank ran backward for them one by one.
    """
    count = view.parts.micro_batches_per_rank
    if count is None or count == 1 or not _ran_one_by_one(view, count):
        return
    for by_rank in view.micro_batch_gradients:
        if all(len(gradients) == count for gradients in by_rank):
            yield torch.stack([torch.stack(gradients) for gradients in by_rank])


def _ran_one_by_one(view: View, count: int) -> bool:
    """True if every rank was seen to call backward for each micro-batch, or for all but one.

    Where nobody watched, only strategies of the suite have several micro-batches, which are known.
    """
    ranks = view.observed.by_rank
    return all(max(2, count - 1) <= len(view.observed.backwards(rank)) <= count for rank in ranks)


def indication(view: View) -> Indication | None:
    """Looks for a last forward pass without synchronisation, after an earlier one with it."""
    flags = [one.synchronised for one in view.observed.wrappers if one.synchronised]
    if flags and all(any(of_wrapper[:-1]) and not of_wrapper[-1] for of_wrapper in flags):
        because = "synchronisation was on in an earlier forward pass, and off in the last one"
        return Indication(True, because)
    return None


def lines(view: View) -> Sequence[PointedLine]:
    """Where the window ends too early, and the last backward, which is left out."""
    calls = view.observed.calls
    count = backward_count(view)
    last = [place.pointed(f"backward {count} of {count}") for place in calls.backwards[-1:]]
    cleared = lines_that_clear(view)
    if cleared:
        return in_order(view, cleared[-1].pointed("discards what was added up before", True), *last)
    early = [place for place in by_hand(view) if place.first.backwards < _begun(view)]
    if early:
        late = _begun(view) - early[0].first.backwards
        note = f"reduces before the last {count_text(late, 'backward')} of {count}"
        return in_order(view, early[0].pointed(note, True), *last)
    off = calls.places(Kind.SYNCHRONISATION, where=lambda call: not call.value)
    switched = [place.pointed("switches synchronisation off", True) for place in off[-1:]]
    switched = lines_of_no_sync(view) or switched
    note = "DDP does not reduce in the last backward" if view.observed.wrappers else ""
    return in_order(
        view,
        *switched,
        *(place.pointed(note, is_fault=not switched) for place in calls.backwards[-1:]),
    )


def _begun(view: View) -> int:
    """How many backwards had begun, on the lowest rank, when the step was over."""
    calls = view.observed.calls
    of_rank = calls.of(min(calls.by_rank, default=0))
    return max((call.backwards + 1 for call in of_rank if call.kind is Kind.BACKWARD), default=0)


def fix(view: View) -> str:
    """Reduce after the last micro-batch."""
    count = backward_count(view)
    if lines_that_clear(view):
        return f"clear gradients once before the window, not between its {count} backwards."
    if by_hand(view) or count < 2:
        if count < 2:
            return "reduce the gradients after the last micro-batch of the window, and only then."
        return f"reduce the gradients once, after backward {count} of {count}."
    return f"run only the first {count - 1} of the {count} forward passes under no_sync."


HYPOTHESIS = Hypothesis(
    name="accumulation_boundary_off_by_one",
    sentence="Gradients were reduced after another micro-batch than the last one of the "
    "accumulation window: the gradients of later micro-batches stay on their rank, or are lost.",
    look_at="the condition that leaves no_sync, such as (i + 1) % accumulation_steps == 0, and the "
    "last window of an epoch",
    predict=predict,
    indication=indication,
    tell_apart="Use at least two micro-batches with different examples.",
    headline="the reduction misses a micro-batch",
    lines=lines,
    fix=fix,
)
