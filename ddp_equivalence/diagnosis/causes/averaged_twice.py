"""Gradients were divided by the number of ranks once more than needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.factors_of_ranks import also_on_one_rank, comes_with_ranks
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    Words,
    WrongFactor,
    common_loss_factor,
    every_loss_is_the_big_batch_loss,
    losses_close,
)
from ddp_equivalence.diagnosis.lines.of_loss import line_that_scales_loss
from ddp_equivalence.diagnosis.lines.of_reduction import (
    averages,
    by_hand,
    hook_was_registered,
    in_hook,
    line_of_reduction,
)
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.own_gradient import backward_alone_is_wrong
from ddp_equivalence.measurement.calls import Kind


def predict(view: View) -> Sequence[Prediction]:
    """The big batch, or the mean of what the ranks contribute, divided by the world size."""
    if view.world_size == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    means = [view.expected]
    contributions = view.parts.contributions()
    if contributions is not None:
        means.append(contributions.mean(0))
    return tuple(Prediction(view.on_every_rank(mean / view.world_size)) for mean in means)


def factors(view: View) -> Sequence[WrongFactor]:
    """One over the world size, where the ranks' gradients should be averaged once."""
    if view.world_size == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    detail = f"divided by {view.world_size}, the number of ranks, once more"
    return (WrongFactor(1 / view.world_size, detail),)


def indication(view: View) -> Indication | None:
    """Speaks for this cause if two divisions were seen, and against it if one rank has the factor.

    Also against it if a loss over gathered outputs, or backward, has the factor.
    """
    if every_loss_is_the_big_batch_loss(view) and view.observed.a_rank_gathered:
        because = "every rank's loss is that of the whole batch, which explains the factor"
        return Indication(False, because)
    if backward_alone_is_wrong(view):
        because = "the ranks hold the mean of what they computed, and began at the right losses"
        return Indication(False, because)
    return also_on_one_rank(view, 1 / view.world_size)


def _divided_loss(view: View) -> PointedLine | None:
    """The line that divides the loss by the number of ranks; None if its loss is the right one."""
    line = line_that_scales_loss(view, 1 / view.world_size)
    common = common_loss_factor(view)
    if line is None or common is None:
        return line
    times = max(len(view.observed.backwards(rank)) for rank in view.observed.by_rank)
    return None if losses_close(common * times, 1.0) else line


def _divisions(view: View) -> list[PointedLine]:
    """The lines that divide the loss, or all gradients, by the number of ranks, the first first."""
    loss, places = _divided_loss(view), view.observed.calls.multiplied_by(1 / view.world_size)
    what = f"divides the gradients by {view.world_size}"
    found = [] if loss is None else [loss]
    for place in places:
        times = _times(place, view.measured.differing)
        often = f", and some of them {times} times" if times > 1 else ""
        found += [place.pointed(f"{what}{often}", is_fault=True)] * times
    return found


def _times(place: CallSite, names: frozenset[str]) -> int:
    """How often the calls of this place changed each of these gradients, at least."""
    changed = [name for call in place.calls for name in (call.change or call).names]
    return min(map(changed.count, names), default=0)


def _divide_factors(view: View) -> list[PointedLine]:
    """The lines that set by which number FSDP divides, if some gradients are not divided so."""
    if len(view.measured.differing) == len(view.parameters.names):
        return []
    places = view.observed.calls.places(Kind.DIVIDE_FACTOR)
    note = "sets by what FSDP divides, in this module alone: not in those sharded inside it"
    return [place.pointed(note, is_fault=True) for place in places]


def _divided_again(view: View) -> bool:
    """True if a division by the number of ranks was seen, beside one that is right."""
    return len(_divisions(view)) > (0 if averages(view) else 1)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the gradients are averaged, and where they or the loss are divided once more."""
    divisions = _divisions(view)
    if not _divided_again(view):
        shown = replace(divisions[-1], is_fault=False) if divisions else None
        if of_one_module := _divide_factors(view):
            return of_one_module
        # What a communication hook does to its bucket is not watched; nothing else divides.
        hides = not divisions and bool(in_hook(view)) and not by_hand(view)
        return in_order(view, line_of_reduction(view, is_fault=hides), shown)
    *others, last = divisions
    before = replace(others[-1], is_fault=False) if others and not averages(view) else None
    return in_order(view, before or line_of_reduction(view), last)


def words(view: View) -> Words | None:
    """Less than the sentence says, where it was not seen that both divisions are by the ranks."""
    count = view.world_size
    if not _divided_again(view):
        sentence = (
            f"Gradients are 1/{count} of what they should be. A second division by {count}, the "
            "number of ranks, explains this, but none was seen."
        )
        headline = f"gradients are 1/{count} of what they should be"
        return Words(sentence, headline, is_guess=True)
    if comes_with_ranks(view, 1 / count):
        return None
    by_loss, by_gradients = _divided_loss(view) is not None, _divides_gradients(view)
    what = "the loss and the gradients are" if by_loss else "the gradients are"
    if averages(view):
        what = "the gradients are" if by_gradients else "the loss is"
        what = f"{_who_averages(view)}, and {what}"
    headline = f"{what} divided by {count}" + ("" if averages(view) or by_loss else " twice")
    sentence = (
        f"{headline[:1].upper()}{headline[1:]}, so that gradients are 1/{count} of what they "
        f"should be. It was not seen whether this {count} is the number of ranks."
    )
    return Words(sentence, headline)


def _divides_gradients(view: View) -> bool:
    return bool(view.observed.calls.multiplied_by(1 / view.world_size))


def _who_averages(view: View) -> str:
    return "ReduceOp.AVG averages" if by_hand(view) else "DDP averages"


def fix(view: View) -> str:
    """Divide once."""
    count = view.world_size
    what = "the gradients" if _divides_gradients(view) else "the loss"
    if averages(view) and _divided_again(view):
        who = _who_averages(view)
        return f"do not divide {what} by {count}: {who} over the {count} ranks already."
    if hook_was_registered(view) and in_hook(view) and not by_hand(view):
        return f"divide by {count}, the number of ranks, once in the hook."
    return f"divide by {count}, the number of ranks, once: in the loss or after the reduction."


HYPOTHESIS = Hypothesis(
    name="averaged_twice",
    sentence="Gradients were divided by the number of ranks once too often.",
    look_at="a division by the world size in the loss or after backward: DDP already averages",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Use another world size: no other cause has a factor that changes with it.",
    headline="gradients are averaged over ranks twice",
    lines=lines,
    fix=fix,
    words=words,
    limits_must_catch=True,
)
