"""Steps in which gradients, ranks or elements part where they must not, at ``# fault``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.lines.faulty_line import mean_squares

Batch = dict[str, Tensor]


def another_order_on_rank_1(model: Any, batch: Batch, rank: Any) -> None:
    mean_squares(model, batch).backward()
    parameters = dict(model.named_parameters())
    order = sorted(parameters, key=lambda name: parameters[name].numel())
    if rank.rank == 1:
        order = [*order[1:3], order[0], *order[3:]]  # fault
    sizes = max(one.numel() for one in parameters.values())
    for name in order:
        padded = torch.zeros(sizes, dtype=torch.float64)
        gradient = parameters[name].grad.flatten()
        padded[: len(gradient)] = gradient
        dist.all_reduce(padded)
        parameters[name].grad.copy_(
            (padded[: len(gradient)] / rank.world_size).view_as(parameters[name])
        )


class Countdown:
    """Reduces all gradients once the last one is there."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())
        self.wanted = len(self.parameters) + 1  # fault
        self.ready = 0

        self.hooks = [
            one.register_post_accumulate_grad_hook(self.on_ready) for one in self.parameters
        ]

    def on_ready(self, parameter: Tensor) -> None:
        self.ready += 1
        if self.ready == self.wanted:
            for one in self.parameters:
                dist.all_reduce(one.grad)
                one.grad /= dist.get_world_size()


def waits_for_one_more(model: Any, batch: Batch, rank: Any) -> None:
    countdown = Countdown(model)
    mean_squares(model, batch).backward()
    for hook in countdown.hooks:
        hook.remove()


def weighted_by_the_largest(model: Any, batch: Batch, rank: Any) -> None:
    largest = torch.tensor(len(batch["x"]))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    weight = len(batch["x"]) / int(largest)
    (mean_squares(model, batch) * weight).backward()  # fault
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

        parameter.grad /= rank.world_size


class Engine:
    """Scales the loss."""

    def __init__(self, model: Any, rank: Any) -> None:
        self.ddp = DistributedDataParallel(model)
        self.scale = 1 / rank.world_size  # fault

    def train(self, batch: Batch) -> None:
        loss = mean_squares(self.ddp, batch)
        loss = loss * self.scale
        loss.backward()


class Members:
    """Averages over some ranks."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank
        members = [one for one in range(rank.world_size) if one % 2 == 0 or one < 2]  # fault
        self.group = dist.new_group(members)
        self.is_one = rank.rank in members

    def average(self, gradient: Any) -> None:
        if self.is_one:
            dist.all_reduce(gradient, group=self.group)
        gradient /= self.rank.world_size


def group_without_the_last(model: Any, batch: Batch, rank: Any) -> None:
    members = Members(rank)
    mean_squares(model, batch).backward()
    for parameter in model.parameters():
        members.average(parameter.grad)
