"""Divided by the number of ranks once more than needed."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if view.world_size == 1 or view.is_sum():
        return ()
    found = view.contributions()
    whole = Way(view.everywhere(view.expected / view.world_size))
    return (
        (whole,)
        if found is None
        else (whole, Way(view.everywhere(found.mean(0) / view.world_size)))
    )


def factors(view: View) -> Sequence[Factor]:
    if view.world_size == 1 or view.is_sum():
        return ()
    return (Factor(1 / view.world_size, f"divided by the {view.world_size} ranks once more"),)


def sign(view: View) -> Sign | None:
    if indications.loss_is_the_big_batch(view) and indications.gathers(view):
        return Sign(False, "every rank's loss is already that of the whole batch")
    return None


HYPOTHESIS = Hypothesis(
    name="averaged_twice",
    sentence="Gradients were divided by the number of ranks twice.",
    look_at="a division by the world size in the loss or after backward: DDP already averages",
    predict=predict,
    factors=factors,
    sign=sign,
    tell_apart="another world size: only this factor follows it",
    of_the_rule=True,
)
