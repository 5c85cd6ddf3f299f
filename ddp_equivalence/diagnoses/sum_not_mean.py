"""Gradients added over the ranks, never divided by their number."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_equivalence.diagnoses.hypothesis import Hypothesis, View


def predict(view: View) -> Sequence[Tensor]:
    if view.world_size == 1 or view.is_sum():
        return ()
    found, constant = view.contributions(), view.constant()
    whole = view.everywhere(view.world_size * view.expected)
    if found is None:
        return (whole,)
    total = found.sum(0)
    if constant is None:
        return whole, view.everywhere(total)
    # A term that does not depend on the data may have been kept out of the sum.
    only_data = total - (view.world_size - 1) * constant
    return whole, view.everywhere(total), view.everywhere(only_data)


HYPOTHESIS = Hypothesis(
    name="sum_not_mean",
    sentence="Gradients were added over the ranks but never divided by their number.",
    look_at="a loss times the world size under DDP, which averages by itself; the factor after the "
    "last all_reduce; a communication hook that replaces DDP's own",
    predict=predict,
)
