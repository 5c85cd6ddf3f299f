"""Ranks take their examples from a DistributedSampler that drops the last examples."""

from __future__ import annotations

from functools import partial

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.sampler_padding_counted import take_from_sampler

FAULT = Fault(
    name="examples_dropped",
    sentence="Ranks take their examples from a DistributedSampler with drop_last=True.",
    break_step=partial(take_from_sampler, drop_last=True),
    strategies=("ddp_global_mean",),
    shards=("empty",),
    extra_examples=1,
    own_step="on_three_ranks",
    acts_at=("forward",),
)
