"""nn.DataParallel's rule on any device: scatter, replicate, and add up the replicas' gradients.

On the CPU, and with one device, nn.DataParallel itself just calls the module. This emulation does
what it does on several GPUs, in one process: every replica has weights of its own, and its
gradients are added to the model's by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import concatenate, take
from ddp_equivalence.strategies.sharded_batch import Facts
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


class Replicas(nn.Module):
    """Scatters its input by ``sizes``, runs a replica on each part, gathers the outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sizes: Sequence[int] = ()
        self.ran: list[dict[str, Tensor]] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        parts = self._scatter((inputs, named))
        self.ran = [self._replica() for _ in parts]
        outputs = [
            functional_call(self.model, weights, *part)
            for weights, part in zip(self.ran, parts, strict=True)
        ]
        return concatenate(outputs)

    def _scatter(self, arguments: Any) -> list[Any]:
        """Every tensor split along dim 0, everything else to all."""
        ends = list(accumulate(self.sizes))
        starts = [0, *ends[:-1]]
        return [
            pytree.tree_map_only(Tensor, itemgetter(slice(start, end)), arguments)
            for start, end in zip(starts, ends, strict=True)
        ]

    def add_gradients(self) -> None:
        """Add what every replica found to the gradient of the model's own parameters."""
        for weights in self.ran:
            for name, parameter in self.model.named_parameters():
                found = weights[name].grad if name in weights else None
                if found is not None:
                    parameter.grad = found if parameter.grad is None else parameter.grad + found

    def _replica(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach().clone().requires_grad_()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }


def whole_loss_breaks(facts: Facts) -> str | None:
    return facts.apart()


def loss_inside_breaks(facts: Facts) -> str | None:
    return facts.mean_over(facts.shards.indices)


def prepare_whole_loss(task: Task) -> TrainStep:
    replicas, steps = Replicas(task.model), iter(task.shards)

    def step(batch: Any) -> None:
        deal = next(steps)
        replicas.sizes = deal.sizes
        # Scatter deals consecutive examples; another deal is the same batch in another order.
        order = [index for indices in deal.indices for index in indices]
        task.loss(replicas, take(batch, order)).backward()
        replicas.add_gradients()
        task.notes["replicas"] = len(replicas.ran)

    return step


def prepare_loss_inside(task: Task) -> TrainStep:
    replicas, steps = Replicas(task.model), iter(task.shards)

    def step(batch: Any) -> None:
        deal = next(steps)
        ran = []
        losses = []
        for indices in deal.indices:
            replicas.sizes = (len(indices),)
            losses.append(task.loss(replicas, take(batch, indices)))
            ran += replicas.ran
        # nn.DataParallel gathers one loss a replica; the caller takes their mean.
        torch.stack(losses).mean().backward()
        replicas.ran = ran
        replicas.add_gradients()
        task.notes["replicas"] = len(ran)

    return step


WHOLE_LOSS = Strategy(
    name="emulated_data_parallel",
    promise="One loss over the gathered outputs is the big batch, for any loss and any shards: "
    "the replicas' gradients add up.",
    breaks=whole_loss_breaks,
    prepare=prepare_whole_loss,
    one_process=True,
)

LOSS_INSIDE = Strategy(
    name="emulated_data_parallel_loss_inside",
    promise="The mean of the replicas' own losses is the big batch if the loss is a mean and "
    "every replica's loss divides by the same number.",
    breaks=loss_inside_breaks,
    prepare=prepare_loss_inside,
    one_process=True,
)
