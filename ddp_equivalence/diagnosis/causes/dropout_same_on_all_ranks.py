"""The step gives all ranks one seed, so that each draws the same masks for other examples."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes import dropout_differs_from_reference
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if not view.has_dropout or view.part_count == 1:
        return ()
    seen = [Way(view.everywhere(way)) for way in view.put_together()]
    return (*seen, *dropout_differs_from_reference.replayed(view))


def sign(view: View) -> Sign | None:
    chosen = dropout_differs_from_reference.same_masks_by_choice(view)
    if chosen:
        return Sign(True, "the step set the same seed on all ranks before its forward pass")
    return Sign(False, "the step did not set the same seed on all ranks")


HYPOTHESIS = Hypothesis(
    name="dropout_same_on_all_ranks",
    sentence="The step gives all ranks the same seed, so that dropout drops the same places on "
    "each: masks of different examples are not independent.",
    look_at="torch.manual_seed on every rank: add the rank to the seed once the weights are built",
    predict=predict,
    sign=sign,
    tell_apart="nothing in the gradients: the state of the ranks' generators",
)
