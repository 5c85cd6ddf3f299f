"""The ranks hold the sum of their gradients, where they should hold the mean."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction, WrongFactor
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View


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


def lines(view: View) -> Sequence[PointedLine]:
    """Where the gradients are added up; under DDP, which averages, where backward begins."""
    calls = view.observed.calls
    summed = [
        place.pointed(
            f"adds up the gradients of {len(place.groups[-1])} ranks; no line divides them",
            is_fault=True,
        )
        for place in calls.reductions
        if place.first.collective is not None and place.first.collective.reduce_op == "SUM"
    ]
    if summed:
        return summed[-1:]
    return [
        place.pointed("DDP reduces here; it averages by itself", is_fault=True)
        for place in calls.backwards[-1:]
    ]


def fix(view: View) -> str:
    """Divide by the world size, or do not multiply by it."""
    if view.observed.calls.reductions:
        return f"divide the gradients by {view.world_size}, the world size, after this line."
    return "do not multiply the loss by the world size, and divide in a communication hook."


HYPOTHESIS = Hypothesis(
    name="sum_not_mean",
    sentence="The ranks hold the sum of their gradients, not the mean: too large by the factor "
    "of their number.",
    look_at="a loss that is multiplied by the world size under DDP, which averages by itself; the "
    "factor after the last all_reduce; a communication hook that sums and does not average",
    predict=predict,
    factors=factors,
    tell_apart="Use another world size: no other cause has a factor that changes with it.",
    headline="gradients are summed, never divided",
    lines=lines,
    fix=fix,
    limits_must_catch=True,
)
