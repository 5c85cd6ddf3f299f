"""A penalty on batch statistics is given the rank's shard. Nothing has to be broken for that."""

from __future__ import annotations

from ddp_equivalence.faults.contrastive_local_negatives import record_calls
from ddp_equivalence.faults.fault import Fault

FAULT = Fault(
    name="batch_statistics_local",
    sentence="The penalty takes the variance of the outputs of the rank's own shard.",
    break_torch=record_calls,
    strategies=("ddp_mean",),
    pairs=(("mlp", "batch_statistics"),),
    strategy_differs_anyway=True,
    own_step="",
)
