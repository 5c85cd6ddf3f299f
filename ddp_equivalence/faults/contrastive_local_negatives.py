"""The contrastive loss of each rank sees its own shard only: nothing has to be broken for that."""

from __future__ import annotations

from typing import Any

from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.faults.in_ddp import calling


def as_it_comes(fire: Fire) -> Any:
    """Nothing changes: it is only told that the model was called."""

    def change(ddp: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        fire()
        return call(*arguments, **named)

    return calling(change)


FAULT = Fault(
    name="contrastive_local_negatives",
    sentence="The contrastive loss takes its negatives from the rank's own shard, as it comes.",
    in_torch=as_it_comes,
    strategies=("ddp_mean",),
    pairs=(("mlp", "contrastive"), ("conv", "contrastive")),
    by_design=True,
)
