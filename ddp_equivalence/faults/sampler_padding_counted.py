"""Ranks take their examples from a DistributedSampler, which repeats some examples."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

from torch.utils.data import DistributedSampler

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep


def take_from_sampler(
    task: Task, step: TrainStep, record_firing: RecordFiring, drop_last: bool = False
) -> TrainStep:
    """Run the step on the examples that torch's DistributedSampler gives to this rank."""
    batches = iter(zip(build_batches(task.case, task.steps), task.shards, strict=True))
    rank = task.rank

    def broken(shard: Any) -> Any:
        batch, shards = next(batches)
        sampler: DistributedSampler[Any] = DistributedSampler(
            cast(Any, cast(Sized, range(shards.examples))),
            num_replicas=rank.world_size,
            rank=rank.rank,
            shuffle=False,
            drop_last=drop_last,
        )
        if sampler.total_size != shards.examples:
            record_firing()
        return step(move(take(batch, list(sampler), task.case.batch_dims), rank.device))

    return broken


FAULT = Fault(
    name="sampler_padding_counted",
    sentence="Ranks take examples from a DistributedSampler, which pads shards to one length.",
    break_step=take_from_sampler,
    strategies=("ddp_global_mean",),
    shards=("empty",),
    extra_examples=1,
    own_step="on_three_ranks",
    acts_at=("forward",),
)
