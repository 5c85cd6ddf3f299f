"""The real nn.DataParallel, on two or more CUDA devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_outputs_are_gathered()


def prepare(task: Task) -> TrainStep:
    devices = list(range(min(torch.cuda.device_count(), task.case.ranks.world_size)))
    parallel = nn.DataParallel(task.model, device_ids=devices)
    devices_used: set[str] = set()

    def note_device(module: nn.Module, *arguments: Any) -> None:
        # Replicas share the module's hooks, so each replica that is called adds its own device.
        devices_used.update(str(leaf.device) for leaf in tensors_of(arguments))

    task.model.register_forward_pre_hook(note_device, with_kwargs=True)

    def step(batch: Any) -> None:
        devices_used.clear()
        task.loss(parallel, batch).backward()
        task.notes["replicas"] = len(devices_used)
        task.notes["devices"] = sorted(devices_used)

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
