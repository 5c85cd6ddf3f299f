"""Ranks take their examples from a DistributedSampler that drops the last ones."""

from __future__ import annotations

from functools import partial

from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.sampler_padding_counted import hidden, sampled

FAULT = Fault(
    name="examples_dropped",
    sentence="Ranks take their examples from a DistributedSampler with drop_last=True.",
    in_step=partial(sampled, drop_last=True),
    hidden=hidden,
    strategies=("ddp_global_mean",),
    shards=("empty",),
    extra_examples=1,
)
