"""No wrapper: gradients reduced by hand between backward and optimizer, averaged or summed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence.strategies.sharded_batch import Facts
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def mean_breaks(facts: Facts) -> str | None:
    return facts.mean_over(facts.shards.indices)


def sum_breaks(facts: Facts) -> str | None:
    return facts.sum_over(facts.shards.indices)


def prepare(task: Task, divide_by_world_size: bool) -> TrainStep:
    divisor = task.rank.world_size if divide_by_world_size else 1

    def step(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        reduce_gradients(task.model, divisor)

    return step


def reduce_gradients(
    model: nn.Module, divisor: int, group: dist.ProcessGroup | None = None
) -> None:
    """All-reduce every gradient in place and divide it.

    A parameter that some ranks did not use counts as zero there; one that no rank used keeps None.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    used = torch.tensor([float(one.grad is not None) for one in parameters])
    used = used.to(parameters[0].device)
    dist.all_reduce(used, group=group)
    for parameter, ranks in zip(parameters, used.tolist(), strict=True):
        if not ranks:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= divisor


MEAN = Strategy(
    name="manual_all_reduce_mean",
    promise="Gradients summed over ranks and divided by their number are the big batch where "
    "DDP's average is.",
    breaks=mean_breaks,
    prepare=partial(prepare, divide_by_world_size=True),
)

SUM = Strategy(
    name="manual_all_reduce_sum",
    promise="Gradients summed over ranks are the big batch if every term of the loss is a sum "
    "over examples.",
    breaks=sum_breaks,
    prepare=partial(prepare, divide_by_world_size=False),
)
