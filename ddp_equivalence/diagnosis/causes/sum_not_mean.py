"""The ranks hold the sum of their gradients, where they should hold the mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, WrongFactor
from ddp_equivalence.diagnosis.lines.lines_in_order import in_order
from ddp_equivalence.diagnosis.lines.lines_of_reduction import (
    by_hand,
    ddp_reduces,
    in_hook,
    is_unseen,
    line_of_reduction,
    line_that_scales,
    line_that_scales_gradients,
)
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Contents


def predict(view: View) -> Sequence[Prediction]:
    """The sum of what the ranks contribute, and the world size times the big batch."""
    if view.world_size == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    multiple = view.world_size * view.expected
    contributions = view.parts.contributions()
    if contributions is None:
        return (Prediction(view.on_every_rank(multiple)),)
    sums = [multiple, contributions.sum(0)]
    constant = view.examples.data_independent_gradient()
    if constant is not None:
        # The data-independent terms may have been kept out of the sum.
        sums.append(contributions.sum(0) - (view.world_size - 1) * constant)
    return tuple(Prediction(view.on_every_rank(one)) for one in sums)


def factors(view: View) -> Sequence[WrongFactor]:
    """The world size, where the ranks' gradients should be averaged."""
    if view.world_size == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    return (WrongFactor(view.world_size, f"multiplied by {view.world_size}, the number of ranks"),)


def indication(view: View) -> Indication | None:
    """Speaks against this cause if some gradients are too large although a line divides them."""
    count = view.world_size
    divided = {name for one in view.observed.calls.multiplied_by(1 / count) for name in one.names}
    if not view.measured.only_some_parameters_differ or not view.measured.differing <= divided:
        return None
    return Indication(False, f"a line divides these gradients by {count}")


def lines(view: View) -> Sequence[PointedLine]:
    """Where gradients are added up, and where they or the loss are multiplied."""
    count = view.world_size
    scaled = line_that_scales(view, count)
    if scaled is not None:
        return in_order(view, line_of_reduction(view), scaled)
    again = _reduced_again(view)
    if again:
        return [again[0].pointed(), again[-1].pointed("reduces the same gradients again", True)]
    twice = _reduced_twice_by_one_line(view)
    if twice is not None:
        return [twice.pointed("reduces the same gradients more than once", is_fault=True)]
    divided = line_that_scales(view, 1 / count)
    if divided is not None:
        return in_order(view, line_of_reduction(view), replace(divided, is_fault=False))
    missing = f"a division of the gradients by {count}"
    # What becomes of a copy of the gradients is not watched.
    in_place = all(
        place.first.collective is not None and place.first.collective.contents is Contents.GRADIENTS
        for place in by_hand(view)
    )
    undivided = "; no line divides them" if in_place else ""
    if not by_hand(view):
        return in_order(view, line_of_reduction(view, is_fault=True, missing=missing))
    return in_order(view, line_of_reduction(view, lambda seen: f"{seen}{undivided}", True, missing))


def _reduced_again(view: View) -> list[Place]:
    """The lines that reduce gradients which another line has reduced before; [] without any."""
    places = by_hand(view)
    twice = [place for place in places[1:] if set(place.names) & set(places[0].names)]
    return [places[0], *twice] if twice else []


def _reduced_twice_by_one_line(view: View) -> Place | None:
    """The line that reduces a gradient again, without a backward pass in between."""
    for place in by_hand(view):
        times = Counter(
            (name, call.backwards)
            for call in place.calls
            if call.collective is not None and call.collective.contents is Contents.GRADIENTS
            for name in call.collective.names
        )
        if times and max(times.values()) > 1:
            return place
    return None


def fix(view: View) -> str:
    """Divide by the world size, or do not multiply by it."""
    count = view.world_size
    scaled = line_that_scales(view, count)
    if scaled is not None:
        what = "the loss" if line_that_scales_gradients(view, count) is None else "the gradients"
        why = f": DDP averages over the {count} ranks by itself" if ddp_reduces(view) else ""
        return f"do not multiply {what} by {count}{why}."
    if _reduced_again(view) or _reduced_twice_by_one_line(view) is not None:
        return f"reduce each gradient once, and divide it by {count}, the number of ranks."
    if is_unseen(view):
        return f"divide the gradients by {count}, the ranks, or do not multiply the loss by it."
    where = "in the hook" if in_hook(view) and not by_hand(view) else "after the reduction"
    return f"divide the gradients by {count}, the number of ranks, {where}."


HYPOTHESIS = Hypothesis(
    name="sum_not_mean",
    sentence="The ranks hold the sum of their gradients, not the mean: too large by the factor "
    "of their number.",
    look_at="a loss that is multiplied by the world size under DDP, which averages by itself; the "
    "factor after the last all_reduce; a communication hook that sums and does not average",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Use another world size: no other cause has a factor that changes with it.",
    headline="gradients are summed, never divided",
    lines=lines,
    fix=fix,
    limits_must_catch=True,
)
