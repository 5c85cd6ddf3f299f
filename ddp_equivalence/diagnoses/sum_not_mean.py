"""Gradients added over the ranks, never divided by their number."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_equivalence.diagnoses.hypothesis import Hypothesis, View


def predict(view: View) -> Sequence[Tensor]:
    if view.world_size == 1 or view.is_sum():
        return ()
    found, constant = view.contributions(), view.constant()
    if found is None:
        return (view.everywhere(view.world_size * view.expected),)
    total = found.sum(0)
    if constant is None:
        return (view.everywhere(total),)
    # A term that does not depend on the data may have been kept out of the sum.
    only_data = total - (view.world_size - 1) * constant
    return view.everywhere(total), view.everywhere(only_data)


HYPOTHESIS = Hypothesis(
    name="sum_not_mean",
    sentence="Gradients were added over the ranks but never divided by their number.",
    look_at="the factor after the last all_reduce, or a communication hook that replaces DDP's own",
    predict=predict,
)
