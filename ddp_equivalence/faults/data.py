"""The ranks train other weights, or read other examples, than they should."""

from __future__ import annotations

from collections.abc import Sized
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.faults.changed_ddp import after_ddp_init, multiply_by_random_numbers
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep

# Every rank trains on the examples of rank 0.


def give_examples_of_rank_0(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """Run the step on the examples of rank 0, on every rank."""
    batches = iter(zip(build_batches(task.case, task.steps), task.shards, strict=True))

    def broken(shard: Any) -> Any:
        batch, shards = next(batches)
        record_firing()
        return step(move(take(batch, shards.indices[0], task.case.batch_dims), task.rank.device))

    return broken


EVERY_RANK_SAME_DATA = Fault(
    name="every_rank_same_data",
    sentence="Every rank is given the examples of rank 0.",
    break_step=give_examples_of_rank_0,
    acts_at=("forward",),
)


# Every rank shuffles the big batch with its own seed, and takes its slice.


SEED = 5


def shuffle_by_rank(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """Run the step on this rank's slice of a permutation that no other rank makes."""
    batches = iter(zip(build_batches(task.case, task.steps), task.shards, strict=True))
    rank = task.rank
    generator = torch.Generator().manual_seed(SEED + rank.rank)

    def broken(shard: Any) -> Any:
        batch, shards = next(batches)
        order = torch.randperm(shards.examples, generator=generator).tolist()
        own = tuple(order[index] for index in shards.indices[rank.rank])
        if rank.world_size > 1:
            record_firing()
        return step(move(take(batch, own, task.case.batch_dims), rank.device))

    return broken


RANKS_SHUFFLE_APART = Fault(
    name="ranks_shuffle_apart",
    sentence="Every rank shuffles the examples with its own seed, and takes its slice of them.",
    break_step=shuffle_by_rank,
    acts_at=("forward",),
)


# Ranks take their examples from a DistributedSampler, which repeats some examples.


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


SAMPLER_PADDING_COUNTED = Fault(
    name="sampler_padding_counted",
    sentence="Ranks take examples from a DistributedSampler, which pads shards to one length.",
    break_step=take_from_sampler,
    strategies=("ddp_global_mean",),
    shards=("empty",),
    extra_examples=1,
    own_step="on_three_ranks",
    acts_at=("forward",),
)


# Ranks take their examples from a DistributedSampler that drops the last examples.


EXAMPLES_DROPPED = Fault(
    name="examples_dropped",
    sentence="Ranks take their examples from a DistributedSampler with drop_last=True.",
    break_step=partial(take_from_sampler, drop_last=True),
    strategies=("ddp_global_mean",),
    shards=("empty",),
    extra_examples=1,
    own_step="on_three_ranks",
    acts_at=("forward",),
)


# Every rank reads one example more than its share: the first one of the next rank.


def read_one_more(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """Run the step on the rank's own examples and the first of the next rank, if there is one."""
    batches = iter(zip(build_batches(task.case, task.steps), task.shards, strict=True))
    rank = task.rank

    def broken(shard: Any) -> Any:
        batch, shards = next(batches)
        examples = list(shards.indices[rank.rank])
        for following in shards.indices[rank.rank + 1 : rank.rank + 2]:
            examples += following[:1]
            record_firing()
        return step(move(take(batch, examples, task.case.batch_dims), rank.device))

    return broken


SHARES_OVERLAP = Fault(
    name="shares_overlap",
    sentence="Every rank but the last one also reads the first example of the next rank.",
    break_step=read_one_more,
    acts_at=("forward",),
)


# All ranks except rank 0 change their weights after DDP has broadcast them.


def change_weights(record_firing: RecordFiring) -> Any:
    """On all ranks except 0, multiply every weight by a random number from 0.5 to 1.5."""

    def change(ddp: Any) -> None:
        if dist.get_rank() == 0:
            return
        multiply_by_random_numbers(ddp.module.parameters())
        record_firing()

    return after_ddp_init(change)


WEIGHTS_DIFFER_BETWEEN_RANKS = Fault(
    name="weights_differ_between_ranks",
    sentence="All ranks but 0 change their weights after DistributedDataParallel was made.",
    break_torch=change_weights,
    acts_at=("wrap",),
)
