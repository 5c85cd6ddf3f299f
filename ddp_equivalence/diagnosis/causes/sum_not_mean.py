"""Gradients added over the ranks, never divided by their number."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if view.world_size == 1 or view.is_sum():
        return ()
    found, constant = view.contributions(), view.constant()
    whole = view.everywhere(view.world_size * view.expected)
    if found is None:
        return (Way(whole),)
    total = found.sum(0)
    if constant is None:
        return Way(whole), Way(view.everywhere(total))
    # A term that does not depend on the data may have been kept out of the sum.
    only_data = total - (view.world_size - 1) * constant
    return Way(whole), Way(view.everywhere(total)), Way(view.everywhere(only_data))


def factors(view: View) -> Sequence[Factor]:
    if view.world_size == 1 or view.is_sum():
        return ()
    return (Factor(view.world_size, f"times the {view.world_size} ranks"),)


HYPOTHESIS = Hypothesis(
    name="sum_not_mean",
    sentence="Gradients were added over the ranks but never divided by their number.",
    look_at="a loss times the world size under DDP, which averages by itself; the factor after the "
    "last all_reduce; a communication hook that replaces DDP's own",
    predict=predict,
    factors=factors,
    tell_apart="another world size: only this factor follows it",
    of_the_rule=True,
)
