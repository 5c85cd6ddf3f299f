"""DDP with SyncBatchNorm, which normalises with the statistics of all ranks' examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    if sharded_batch.model_coupled == "batch_norm_local_statistics":
        sharded_batch = replace(sharded_batch, model_coupled=None)
    return sharded_batch.cause_if_averaged(sharded_batch.shards.indices)


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap(nn.SyncBatchNorm.convert_sync_batchnorm(task.model))

    def step(shard: Any) -> None:
        task.loss(ddp, shard).backward()

    return step


STRATEGY = Strategy(
    name="sync_batch_norm",
    promise="Batch norm takes the statistics of all ranks' examples, so that DDP's average over "
    "the ranks is the gradient of the big batch, with batch norm as without, if the loss is a mean "
    "and every rank's loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    lane="nccl",  # Torch has no SyncBatchNorm for the CPU.
    tries_few_cases=True,
)
