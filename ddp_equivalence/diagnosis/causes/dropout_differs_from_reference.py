"""Dropout masks that no big batch would have drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    found = view.contributions()
    if found is None or not view.has_dropout:
        return ()
    # The masks that the ranks drew are in the gradients that they were seen to compute.
    seen = [Way(view.everywhere(way)) for way in view.put_together()]
    if view.part_count == 1:
        return (*seen, *replayed(view))
    # The same seed on every rank: each draws the mask of its own shard's shape. Holds on the
    # device the prediction is computed on; another has another generator.
    return (Way(view.everywhere(found.mean(0))), *seen, *replayed(view))


def replayed(view: View) -> Iterator[Way]:
    """What the ranks' own generators draw, as they stood before each forward pass."""
    if view.read is None or not view.on_cpu:
        return
    rows = []
    for rank, micro_batches in enumerate(view.read):
        seen = view.observed[rank]
        if len(seen.forwards) != len(micro_batches):
            return
        pieces = [
            view.piece(examples, forward.generator).vector
            for examples, forward in zip(micro_batches, seen.forwards, strict=True)
        ]
        rows.append(torch.stack(pieces).mean(0))
    yield Way(view.everywhere(torch.stack(rows).mean(0)))


def same_masks_by_choice(view: View) -> bool | None:
    """True if the step itself set the same seed on all ranks; None if that is not known."""
    seeds = {tuple(one.seed for one in seen.forwards) for seen in view.observed.values()}
    if not seeds or view.world_size == 1:
        return None
    return len(seeds) == 1 and view.seed not in seeds.pop()


def sign(view: View) -> Sign | None:
    if same_masks_by_choice(view):
        return Sign(False, "the step gave all ranks the same seed")
    return None


def plausible(view: View) -> bool:
    return view.has_dropout and view.part_count > 1 and not view.on_cpu


HYPOTHESIS = Hypothesis(
    name="dropout_differs_from_reference",
    sentence="Dropout draws other masks for a shard than for the big batch. This is a property of "
    "the model, not a fault of the reduction.",
    look_at="model.eval() or p=0 while gradients are compared",
    predict=predict,
    sign=sign,
    plausible=plausible,
    tell_apart="the same model in eval mode",
    of_the_rule=True,
)
