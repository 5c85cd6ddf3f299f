"""A root of a mean is given the rank's shard. Nothing has to be broken for that."""

from __future__ import annotations

from ddp_equivalence.faults.contrastive_local_negatives import record_calls
from ddp_equivalence.faults.fault import Fault

FAULT = Fault(
    name="statistic_not_additive",
    sentence="The loss is the root of the mean squared error of the rank's own shard.",
    break_torch=record_calls,
    strategies=("ddp_mean",),
    pairs=(("mlp", "root_mean_square"),),
    strategy_differs_anyway=True,
    own_step="",
)
