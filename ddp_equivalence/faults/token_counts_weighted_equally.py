"""The loss divides by the rank's own tokens, weights or positives."""

from __future__ import annotations

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.uneven_shards_weighted_equally import own_divisor

FAULT = Fault(
    name="token_counts_weighted_equally",
    sentence="The global count of tokens is replaced by each rank's own.",
    in_step=own_divisor,
    strategies=("ddp_global_mean",),
    of_counts=True,
    pairs=(
        ("gru_tied", "token_mean"),
        ("attention_tied", "token_mean"),
        ("mlp", "two_normalisers"),
        ("mlp", "label_weighted_mean"),
    ),
)
