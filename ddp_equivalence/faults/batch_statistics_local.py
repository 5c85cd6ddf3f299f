"""A penalty on statistics of the batch sees the rank's shard only, as it comes."""

from __future__ import annotations

from ddp_equivalence.faults.contrastive_local_negatives import as_it_comes
from ddp_equivalence.faults.fault import Fault

FAULT = Fault(
    name="batch_statistics_local",
    sentence="The penalty takes the variance of the outputs of the rank's own shard, as it comes.",
    in_torch=as_it_comes,
    strategies=("ddp_mean",),
    pairs=(("mlp", "batch_statistics"),),
    by_design=True,
)
