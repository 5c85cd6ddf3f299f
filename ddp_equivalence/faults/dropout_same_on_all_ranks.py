"""All ranks draw the same dropout masks."""

from __future__ import annotations

from ddp_equivalence.faults.dropout_differs_from_reference import seed_before_forward
from ddp_equivalence.faults.fault import Fault

FAULT = Fault(
    name="dropout_same_on_all_ranks",
    sentence="Every rank seeds its generator with the same seed before the forward pass.",
    break_torch=lambda record_firing: seed_before_forward(record_firing, by_rank=False),
    strategies=("ddp_mean",),
    pairs=(("dropout", "mse_mean"), ("dropout", "cross_entropy_mean")),
    strategy_differs_anyway=True,
    own_step="of_dropout",
    acts_at=("forward",),
)
