"""Divided by the number of ranks once more than needed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_equivalence.diagnoses.hypothesis import Hypothesis, View


def predict(view: View) -> Sequence[Tensor]:
    if view.world_size == 1 or view.is_sum():
        return ()
    found = view.contributions()
    whole = view.everywhere(view.expected / view.world_size)
    return (whole,) if found is None else (whole, view.everywhere(found.mean(0) / view.world_size))


HYPOTHESIS = Hypothesis(
    name="averaged_twice",
    sentence="Gradients were divided by the number of ranks twice.",
    look_at="a division by the world size in the loss or after backward: DDP already averages",
    predict=predict,
)
