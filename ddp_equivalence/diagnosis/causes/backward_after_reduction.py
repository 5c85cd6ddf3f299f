"""Another backward ran after gradients had been reduced, and nothing reduced what it added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, ranks_by_number
from ddp_equivalence.diagnosis.lines.source_tree import at_meeting
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind


def predict(view: View) -> Sequence[Prediction]:
    """The mean of what was computed before the reduction, plus the rank's own later gradients."""
    reduced = _backwards_reduced(view)
    gradients = _gradients_by_backward(view) if reduced else None
    if gradients is None or not view.setting.every_rank_reports:
        return ()
    zero = torch.zeros_like(view.expected)
    early = torch.stack(
        [sum(gradients[rank][:end], zero) for rank, end in enumerate(reduced)]
    ).mean(0)
    late = torch.stack([sum(gradients[rank][end:], zero) for rank, end in enumerate(reduced)])
    size = view.world_size
    return (
        Prediction(view.on_reporting_ranks(early + late)),
        Prediction(view.on_reporting_ranks(early + late / size), f"it is divided by {size} too"),
    )


def _gradients_by_backward(view: View) -> list[list[Tensor]] | None:
    """For every rank, the gradient that each backward of the step added; None if one is unknown."""
    by_rank = []
    zero = torch.zeros_like(view.expected)
    for rank in range(view.world_size):
        calls = view.observed.backwards(rank)
        gradients = [zero if call.gradient is None else call.gradient for call in calls]
        if any(len(gradient) != len(zero) for gradient in gradients):
            return None
        by_rank.append([view.setting.scale * gradient for gradient in gradients])
    return by_rank


def _backwards_reduced(view: View) -> tuple[int, ...]:
    """For every rank, how many backwards had run at the last reduction; () if none ran later.

    Also () if the later ones are other micro-batches of the same loop: a boundary is then wrong.
    """
    if not view.observed.covers_every_rank or view.world_size == 1:
        return ()
    reduced = tuple(_reduced_on(view, rank) for rank in range(view.world_size))
    later = [
        rank for rank, end in enumerate(reduced) if 0 < end < len(view.observed.backwards(rank))
    ]
    if not all(reduced) or not later:
        return ()
    if any(one.synchronised and not one.synchronised[-1] for one in view.observed.wrappers):
        return ()  # the later forward pass was told not to synchronise
    is_own = all(_has_its_own_line(view, rank, reduced[rank]) for rank in later)
    if is_own or all(_reads_nothing_new(view, rank, reduced[rank]) for rank in later):
        return reduced
    return ()


def _reduced_on(view: View, rank: int) -> int:
    """How many backwards of this rank had run when gradients were last reduced; 0 if never."""
    last = begun = 0
    for call in view.observed.calls.of(rank):
        begun += call.kind is Kind.BACKWARD
        if reduces_gradients(call):
            last = begun
    if any(any(wrapper.synchronised) for wrapper in view.observed.wrappers):
        for number, backward in enumerate(view.observed.backwards(rank), start=1):
            before, after = backward.issued
            if before is not None and after is not None and after > before:
                last = max(last, number)
    return last


def _has_its_own_line(view: View, rank: int, reduced: int) -> bool:
    """True if the backwards after the reduction stand on other lines than those before it."""
    lines = [_line(call) for call in view.observed.calls.of(rank) if call.kind is Kind.BACKWARD]
    if None in lines or len(lines) != len(view.observed.backwards(rank)):
        return False
    return not set(lines[:reduced]) & set(lines[reduced:])


def _line(call: Call) -> CodeLine | None:
    return call.users_line or call.line


def _reads_nothing_new(view: View, rank: int, reduced: int) -> bool:
    """True if the later forward passes read only rows that were read before the reduction."""
    backwards = view.observed.backwards(rank)
    forwards = view.observed.by_rank[rank].forwards
    early = [
        one for one in forwards[: backwards[reduced - 1].forwards] if one.step == view.setting.step
    ]
    late = forwards[backwards[reduced - 1].forwards : backwards[-1].forwards]
    if any(one.rows is None for one in (*early, *late)):
        return False
    read = {row for one in early if one.rows is not None for row in one.rows.candidates}
    return all(read.issuperset(one.rows.candidates) for one in late if one.rows is not None)


def indication(view: View) -> Indication | None:
    """Looks for a backward after the last reduction."""
    reduced = _backwards_reduced(view)
    if not reduced:
        return None
    later = [rank for rank, end in enumerate(reduced) if end < len(view.observed.backwards(rank))]
    who = "every rank" if len(later) == view.world_size else ranks_by_number(later)
    return Indication(True, f"{who} called backward again after the last reduction of gradients")


def _places(view: View) -> tuple[list[CallSite], list[CallSite]]:
    """The lines that reduce, and the lines of the backwards after the last reduction."""
    calls, reduced = view.observed.calls, _backwards_reduced(view)
    late = {
        id(call)
        for rank, end in enumerate(reduced)
        for call in [one for one in calls.of(rank) if one.kind is Kind.BACKWARD][end:]
    }
    reducing = {
        id(call)
        for rank, end in enumerate(reduced)
        for call in [one for one in calls.of(rank) if one.kind is Kind.BACKWARD][end - 1 : end]
    }
    by_hand = calls.reductions
    return (
        by_hand or calls.places(Kind.BACKWARD, where=lambda call: id(call) in reducing),
        calls.places(Kind.BACKWARD, where=lambda call: id(call) in late),
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where gradients are reduced, and the backward that comes too late."""
    reductions, late = _places(view)
    shown = []
    for place in reductions[-1:]:
        by_ddp = place.kind is Kind.BACKWARD
        shown.append(place.pointed("DDP reduced here" if by_ddp else "gradients are reduced here"))
    note = "afterwards: what it adds stays on its own rank"
    if shown and late:
        late_line = late[0].pointed(note, is_fault=True)
        met = at_meeting(shown[0], late_line, reductions[-1].calls[-1], late[0].first)
        if met[:2] != [shown[0], late_line]:
            return met
    return [*shown, *(place.pointed(note, is_fault=True) for place in late[:2])]


def fix(view: View) -> str:
    """One backward, or the reduction after both."""
    reductions, late = _places(view)
    if reductions and reductions[-1].kind is Kind.BACKWARD:
        return "add the losses and call backward() once: (loss + other_loss).backward()."
    if reductions and late:
        number, before = late[0].line.number, reductions[0].line.number
        return f"move the backward of line {number} before the reduction in line {before}."
    return "call every backward() before gradients are reduced."


HYPOTHESIS = Hypothesis(
    name="backward_after_reduction",
    sentence="Backward was called once more after gradients had been reduced: what it added stays "
    "on its own rank.",
    look_at="a second loss with a backward() of its own: DDP reduces in the first one, and what "
    "is reduced by hand must come after the last one",
    predict=predict,
    indication=indication,
    tell_apart="Leave the later backward out: only this difference then goes away.",
    headline="a later backward is not all-reduced",
    lines=lines,
    fix=fix,
)
