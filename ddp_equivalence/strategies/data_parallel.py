"""The real nn.DataParallel, on several CUDA devices, or with all replicas on one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp_equivalence.strategies.replicas import Replicas
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_outputs_are_gathered()


def prepare(task: Task) -> TrainStep:
    replicas_wanted = task.case.ranks.world_size
    is_enough = torch.cuda.device_count() >= replicas_wanted
    devices = list(range(replicas_wanted)) if is_enough else [0] * replicas_wanted
    parallel = nn.DataParallel(task.model, device_ids=devices)
    replicas = Replicas(task, parallel)

    def step(batch: Any) -> None:
        replicas.forget()
        task.loss(parallel, batch).backward()
        replicas.note()

    return step


STRATEGY = Strategy(
    name="data_parallel",
    promise="One loss over the gathered outputs gives the gradient of the big batch: the replicas' "
    "gradients add up.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    one_process=True,
    lane="data_parallel",
    splits_the_batch_itself=True,
)
