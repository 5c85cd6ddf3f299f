"""Ranks take their examples from a DistributedSampler, which repeats some of them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

from torch.utils.data import DistributedSampler

from ddp_equivalence.case.batch import count_examples, move, take
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.fault import Fault, Fire
from ddp_equivalence.strategies.strategy import Task, TrainStep


def sampled(task: Task, step: TrainStep, fire: Fire, drop_last: bool = False) -> TrainStep:
    """The examples that torch's own sampler deals to this rank."""
    batches = iter(build_batches(task.case, task.steps))
    rank = task.rank

    def broken(shard: Any) -> Any:
        batch = next(batches)
        sampler: DistributedSampler[Any] = DistributedSampler(
            cast(Any, cast(Sized, range(count_examples(batch)))),
            num_replicas=rank.world_size,
            rank=rank.rank,
            shuffle=False,
            drop_last=drop_last,
        )
        if sampler.total_size != count_examples(batch):
            fire()
        return step(move(take(batch, list(sampler)), rank.device))

    return broken


def hidden(layout: Layout) -> str | None:
    """One rank takes everything, and nothing is padded."""
    return "there is one rank alone" if layout.world_size == 1 else None


FAULT = Fault(
    name="sampler_padding_counted",
    sentence="Ranks take examples from a DistributedSampler, which pads shards to one length.",
    in_step=sampled,
    hidden=hidden,
    strategies=("ddp_global_mean",),
    shards=("empty",),
    extra_examples=1,
)
