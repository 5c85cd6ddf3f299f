"""Every rank computes the loss of the whole batch, but only its own part carries a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, WrongFactor
from ddp_equivalence.diagnosis.indications import (
    every_loss_is_the_big_batch_loss,
    indication_if,
    losses_of_backwards,
)
from ddp_equivalence.diagnosis.view import View


def factors(view: View) -> Sequence[WrongFactor]:
    """One over the world size, where the ranks may compute the loss of the whole batch."""
    if view.world_size == 1:
        return ()
    if not (view.setting.batch_coupled or every_loss_is_the_big_batch_loss(view)):
        return ()
    detail = f"each of the {view.world_size} ranks adds only its own part of the gradient"
    return (WrongFactor(1 / view.world_size, detail),)


def indication(view: View) -> Indication | None:
    """Compares the losses at which backward began with the loss of the whole batch."""
    if losses_of_backwards(view) is None:
        return None
    return indication_if(
        every_loss_is_the_big_batch_loss(view),
        "backward began at the loss of the whole batch on every rank",
        "backward did not begin at the loss of the whole batch",
    )


HYPOTHESIS = Hypothesis(
    name="gather_without_gradient",
    sentence="Every rank computes the loss of the whole batch, but only the rank's own examples "
    "carry a gradient. The average over the ranks then divides once too often by their number.",
    look_at="dist.all_gather or dist.all_reduce in the forward pass: they pass no gradient on; "
    "use the functions of torch.distributed.nn.functional, which do",
    factors=factors,
    indication=indication,
    tell_apart="Print the loss of each rank: here it is the loss of the whole batch.",
)
