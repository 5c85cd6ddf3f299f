"""nn.DataParallel's rule on any device: scatter, replicate, and add up the replicas' gradients.

On the CPU, and with one device, nn.DataParallel itself only calls the module. This emulation does
in one process what nn.DataParallel does on several GPUs: every replica has its own copy of the
weights, and its gradients are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddp_equivalence.case.batch import concatenate, take
from ddp_equivalence.case.batch_tree import map_tensors, tensors_of
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


class EmulatedDataParallel(nn.Module):
    """Takes the place of ``nn.DataParallel(module)`` on ``gpus`` GPUs, in one process.

    Each part of the batch is given to a replica with weights of its own, whose gradients autograd
    adds up, and the outputs are gathered. DistributedDataParallel can wrap it. ``sizes``: the
    number of examples in each part, if its caller sets them; else ``Tensor.chunk`` cuts the batch.
    After a call, ``weights_by_replica`` has the weights of every replica that ran, by name.
    """

    def __init__(self, module: nn.Module, gpus: int = 1) -> None:
        super().__init__()
        self.module, self.gpus = module, gpus
        self.sizes: Sequence[int] = ()
        self.weights_by_replica: list[dict[str, Tensor]] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The gathered outputs. Tensors are split along dim 0; all else is given to each part."""
        arguments = inputs, named
        sizes = self.sizes or [len(part) for part in tensors_of(arguments)[0].chunk(self.gpus)]
        ends = list(accumulate(sizes))
        parts = [
            map_tensors(itemgetter(slice(end - size, end)), arguments)
            for size, end in zip(sizes, ends, strict=True)
        ]
        self.weights_by_replica = [self._replica() for _ in parts]
        replicas = zip(self.weights_by_replica, parts, strict=True)
        return concatenate(
            [functional_call(self.module, weights, *part) for weights, part in replicas]
        )

    def _replica(self) -> dict[str, Tensor]:
        weights = {name: one.clone() for name, one in self.module.named_parameters()}
        for weight in weights.values():
            if weight.requires_grad:
                weight.retain_grad()
        return weights


def cause_with_whole_loss(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_outputs_are_gathered()


def cause_with_loss_inside(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_averaged(sharded_batch.shards.indices)


def prepare_whole_loss(task: Task) -> TrainStep:
    parallel, shards_by_step = EmulatedDataParallel(task.model), iter(task.shards)

    def step(batch: Any) -> None:
        shards = next(shards_by_step)
        parallel.sizes = shards.sizes
        # Sorting the batch by shards first gives every replica its shard.
        order = [index for indices in shards.indices for index in indices]
        task.loss(parallel, take(batch, order)).backward()
        task.notes["replicas"] = len(parallel.weights_by_replica)

    return step


def prepare_loss_inside(task: Task) -> TrainStep:
    parallel, shards_by_step = EmulatedDataParallel(task.model), iter(task.shards)

    def step(batch: Any) -> None:
        losses = []
        for indices in next(shards_by_step).indices:
            parallel.sizes = (len(indices),)
            losses.append(task.loss(parallel, take(batch, indices)))
        # nn.DataParallel gathers one loss from each replica, and its caller takes their mean.
        torch.stack(losses).mean().backward()
        task.notes["replicas"] = len(losses)

    return step


WHOLE_LOSS = Strategy(
    name="emulated_data_parallel",
    promise="One loss over the gathered outputs gives the gradient of the big batch for any loss "
    "and any shards: the replicas' gradients add up.",
    cause_of_difference=cause_with_whole_loss,
    prepare=prepare_whole_loss,
    one_process=True,
)

LOSS_INSIDE = Strategy(
    name="emulated_data_parallel_loss_inside",
    promise="The mean of the replicas' own losses gives the gradient of the big batch if the loss "
    "is a mean and every replica's loss divides by the same number.",
    cause_of_difference=cause_with_loss_inside,
    prepare=prepare_loss_inside,
    one_process=True,
)
