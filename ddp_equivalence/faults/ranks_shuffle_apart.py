"""Every rank shuffles the big batch with its own seed, and takes its slice."""

from __future__ import annotations

from typing import Any

import torch

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep

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


FAULT = Fault(
    name="ranks_shuffle_apart",
    sentence="Every rank shuffles the examples with its own seed, and takes its slice of them.",
    break_step=shuffle_by_rank,
    acts_at=("forward",),
)
