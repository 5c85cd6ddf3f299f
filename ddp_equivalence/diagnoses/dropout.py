"""Dropout masks that no big batch would have drawn."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_equivalence.diagnoses.hypothesis import Hypothesis, View


def predict(view: View) -> Sequence[Tensor]:
    found = view.contributions()
    if found is None or view.part_count == 1 or not view.has_dropout:
        return ()
    # The same seed on every rank: each draws the mask of its own shard's shape. Holds on the
    # device the prediction is computed on; another has another generator.
    return (view.everywhere(found.mean(0)),)


def plausible(view: View) -> bool:
    return view.has_dropout and view.part_count > 1 and not view.on_cpu


HYPOTHESIS = Hypothesis(
    name="dropout_differs_from_reference",
    sentence="Dropout draws other masks for a shard than for the big batch. This is a property of "
    "the model, not a fault of the reduction.",
    look_at="model.eval() or p=0 while gradients are compared",
    predict=predict,
    plausible=plausible,
)
