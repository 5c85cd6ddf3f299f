"""All ranks draw the same masks."""

from __future__ import annotations

from ddp_equivalence.faults.dropout_differs_from_reference import seeding
from ddp_equivalence.faults.fault import Fault

FAULT = Fault(
    name="dropout_same_on_all_ranks",
    sentence="Every rank seeds its generator with the same seed before the forward pass.",
    in_torch=lambda fire: seeding(fire, by_rank=False),
    strategies=("ddp_mean",),
    pairs=(("dropout", "mse_mean"), ("dropout", "cross_entropy_mean")),
    by_design=True,
)
