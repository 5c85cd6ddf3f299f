"""Outputs or losses of other ranks came without their gradient, and the rest was averaged."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Sign
from ddp_equivalence.diagnosis.view import View


def factors(view: View) -> Sequence[Factor]:
    if view.world_size == 1:
        return ()
    if not (view.batch_coupled or indications.loss_is_the_big_batch(view)):
        return ()
    return (Factor(1 / view.world_size, f"each of {view.world_size} ranks brings its own part"),)


def sign(view: View) -> Sign | None:
    if not view.observed or indications.losses(view) is None:
        return None
    return indications.only_if(
        indications.loss_is_the_big_batch(view),
        "backward began at the loss of the whole batch on every rank, and gathered values carry no "
        "gradient",
        "backward began at other losses than that of the whole batch",
    )


HYPOTHESIS = Hypothesis(
    name="gather_without_gradient",
    sentence="Every rank's loss is that of the whole batch, but only its own examples carry a "
    "gradient; the average over the ranks then divides by their number once too often.",
    look_at="dist.all_gather or dist.all_reduce in the forward pass, which pass no gradient on: "
    "torch.distributed.nn.functional has those that do",
    factors=factors,
    sign=sign,
    tell_apart="the value of each rank's loss: here it is that of the whole batch",
)
