"""The real nn.DataParallel over several GPUs inside each rank, and the average between ranks.

Programs that were written for one machine are extended to several like this: one process for each
machine drives all its GPUs. Here the gradients are averaged between the processes by hand. Where
there are too few GPUs, all replicas of a rank are on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.replicas import Replicas
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep

GPUS_PER_RANK = 2


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_averaged(sharded_batch.shards.indices)


def prepare(task: Task) -> TrainStep:
    first, count = task.rank.device.index, torch.cuda.device_count()
    devices = [(first + number) % count for number in range(GPUS_PER_RANK)]
    parallel = nn.DataParallel(task.model, device_ids=devices)
    replicas = Replicas(task, parallel)

    def step(shard: Any) -> None:
        replicas.forget()
        task.loss(parallel, shard).backward()
        reduce_gradients(task.model, divisor=task.rank.world_size)
        replicas.note()

    return step


STRATEGY = Strategy(
    name="hybrid_data_parallel",
    promise="One loss over the gathered outputs of each rank, and the average of the ranks' "
    "gradients, give the gradient of the big batch if the loss is a mean and every rank's loss "
    "divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    lane="nccl",
    gpus_per_rank=GPUS_PER_RANK,
    splits_the_batch_itself=True,
)
