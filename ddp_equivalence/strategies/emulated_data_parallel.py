"""nn.DataParallel's rule on any device: scatter, replicate, and add up the replicas' gradients.

On the CPU, and with one device, nn.DataParallel itself only calls the module. This emulation does
in one process what nn.DataParallel does on several GPUs: every replica has its own copy of the
weights, and its gradients are added to those of the model.
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
from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


class Replicas(nn.Module):
    """Scatters its inputs, runs one replica of the model on each part, and gathers the outputs.

    The caller sets ``sizes``, the number of examples in each part, before a call. After a call,
    ``weights_by_replica`` has the weights of every replica that ran, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sizes: Sequence[int] = ()
        self.weights_by_replica: list[dict[str, Tensor]] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        parts = self._scatter((inputs, named))
        self.weights_by_replica = [self._replica() for _ in parts]
        outputs = [
            functional_call(self.model, weights, *part)
            for weights, part in zip(self.weights_by_replica, parts, strict=True)
        ]
        return concatenate(outputs)

    def _scatter(self, arguments: Any) -> list[Any]:
        """The arguments of every part: tensors are split along dim 0, all else is the same."""
        ends = list(accumulate(self.sizes))
        starts = [0, *ends[:-1]]
        return [
            map_tensors(itemgetter(slice(start, end)), arguments)
            for start, end in zip(starts, ends, strict=True)
        ]

    def add_gradients(self) -> None:
        """After backward: add the gradients of every replica to those of the model's parameters."""
        for weights in self.weights_by_replica:
            for name, parameter in self.model.named_parameters():
                gradient = weights[name].grad if name in weights else None
                if gradient is not None:
                    before = parameter.grad
                    parameter.grad = gradient if before is None else before + gradient

    def _replica(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach().clone().requires_grad_()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }


def cause_with_whole_loss(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_outputs_are_gathered()


def cause_with_loss_inside(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_averaged(sharded_batch.shards.indices)


def prepare_whole_loss(task: Task) -> TrainStep:
    replicas, shards_by_step = Replicas(task.model), iter(task.shards)

    def step(batch: Any) -> None:
        shards = next(shards_by_step)
        replicas.sizes = shards.sizes
        # Scatter splits a batch into consecutive examples. Sorting the batch by shards first gives
        # every replica its shard.
        order = [index for indices in shards.indices for index in indices]
        task.loss(replicas, take(batch, order)).backward()
        replicas.add_gradients()
        task.notes["replicas"] = len(replicas.weights_by_replica)

    return step


def prepare_loss_inside(task: Task) -> TrainStep:
    replicas, shards_by_step = Replicas(task.model), iter(task.shards)

    def step(batch: Any) -> None:
        ran = []
        losses = []
        for indices in next(shards_by_step).indices:
            replicas.sizes = (len(indices),)
            losses.append(task.loss(replicas, take(batch, indices)))
            ran += replicas.weights_by_replica
        # nn.DataParallel gathers one loss from each replica, and its caller takes their mean.
        torch.stack(losses).mean().backward()
        replicas.weights_by_replica = ran
        replicas.add_gradients()
        task.notes["replicas"] = len(ran)

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
