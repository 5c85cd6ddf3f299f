"""Each rank's loss divides by the rank's own number of tokens or positives, or sum of weights."""

from __future__ import annotations

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.uneven_shards_weighted_equally import divide_by_own_count

FAULT = Fault(
    name="token_counts_weighted_equally",
    sentence="Each rank's loss divides by its own count of tokens, not by the global count.",
    break_step=divide_by_own_count,
    strategies=("ddp_global_mean",),
    needs_unequal_divisors=True,
    pairs=(
        ("gru_tied", "token_mean"),
        ("attention_tied", "token_mean"),
        ("mlp", "two_normalisers"),
        ("mlp", "label_weighted_mean"),
    ),
    own_step="",
)
