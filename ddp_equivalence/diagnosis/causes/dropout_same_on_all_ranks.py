"""The step gives all ranks the same seed, so that they draw the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes.dropout_differs_from_reference import (
    replayed,
    step_set_the_same_seed,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean of gradients that were computed with the masks that the ranks drew."""
    if view.parts.count == 1 or not view.examples.draws_random_numbers:
        return ()
    observed = [Prediction(view.on_every_rank(one)) for one in view.averages_of_node_sums()]
    return (*observed, *replayed(view))


def indication(view: View) -> Indication | None:
    """Compares the seeds before the forward passes of the ranks."""
    if step_set_the_same_seed(view):
        because = "the step set the same seed on all ranks before its forward pass"
        return Indication(True, because)
    return Indication(False, "the step did not set the same seed on all ranks")


HYPOTHESIS = Hypothesis(
    name="dropout_same_on_all_ranks",
    sentence="The step gives all ranks the same seed, so that every rank draws the same random "
    "numbers (dropout, noise): those of different examples are not independent.",
    look_at="torch.manual_seed on every rank: add the rank to the seed once the weights are built",
    predict=predict,
    indication=indication,
    tell_apart="Gradients alone cannot decide: compare the states of the ranks' generators.",
)
