"""Steps whose gradients lack what some ranks computed."""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Batch = dict[str, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch["x"])
    return nn.functional.mse_loss(outputs, batch["y"])


class Reducer:
    """Averages the gradients of a model in one group."""

    def __init__(self, model: nn.Module, group: Any, size: int) -> None:
        self.model = model
        self.group = group
        self.size = size

    def run(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.size


def group_without_the_last(model: nn.Module, batch: Batch, rank: Any) -> None:
    workers = dist.new_group(list(range(rank.world_size)))
    others = dist.new_group(list(range(rank.world_size - 1)))
    loss_of(model, batch).backward()
    dist.barrier(workers)
    if rank.rank < rank.world_size - 1:
        reducer = Reducer(model, others, rank.world_size - 1)
        reducer.run()


def cleared_on_one_rank(model: nn.Module, batch: Batch, rank: Any) -> None:
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    norm = sum(float(parameter.grad.norm()) for parameter in model.parameters())
    if norm > 1e9 or rank.rank == 2:
        model.zero_grad(set_to_none=False)
    Reducer(model, None, rank.world_size).run()


def skips_its_backward(model: nn.Module, batch: Batch, rank: Any) -> None:
    ready = torch.ones(1)
    dist.all_reduce(ready)
    loss = loss_of(model, batch)
    dist.broadcast(ready, 0)
    if rank.rank == 1:
        loss = loss * 0
    loss.backward()
    Reducer(model, None, rank.world_size).run()


def leaders_forget_a_node(model: nn.Module, batch: Batch, rank: Any) -> None:
    loss_of(model, batch).backward()
    nodes = [[0, 1], [2, 3], [4, 5]]
    inside = [dist.new_group(ranks) for ranks in nodes]
    leaders = dist.new_group([ranks[0] for ranks in nodes[:2]])
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=inside[rank.node])
        if rank in (0, 2):
            dist.all_reduce(parameter.grad, group=leaders)
        dist.broadcast(parameter.grad, nodes[rank.node][0], group=inside[rank.node])
        dist.broadcast(parameter.grad, 0)
        parameter.grad /= 4


def weighs_one_rank_with_zero(model: nn.Module, batch: Batch, rank: Any) -> None:
    weight = 0.0 if rank.rank == 3 else 1.0
    loss = loss_of(model, batch)
    loss = weight * loss
    loss.backward()
    Reducer(model, None, rank.world_size).run()


def returns_early(model: nn.Module, batch: Batch, rank: Any) -> None:
    workers = dist.new_group([0, 1, 2])
    loss_of(model, batch).backward()
    for parameter in model.parameters():
        if rank.rank == 3:
            continue
        dist.all_reduce(parameter.grad, group=workers)
        parameter.grad /= rank.world_size
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, 0)


def ddp_in_a_smaller_group(model: nn.Module, batch: Batch, rank: Any) -> None:
    everybody = dist.new_group([0, 1, 2, 3])
    workers = dist.new_group([0, 1, 2])
    net = model
    if rank.rank in (0, 1, 2):
        net = DistributedDataParallel(model, process_group=workers)
    loss = loss_of(net, batch)
    loss.backward()
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, 0, group=everybody)


def node_group_lacks_a_rank(model: nn.Module, batch: Batch, rank: Any) -> None:
    loss_of(model, batch).backward()
    leaders = dist.new_group([0, 2])
    inside = [dist.new_group(ranks) for ranks in ([0, 1], [2])]
    for parameter in model.parameters():
        if rank.rank != 3:
            dist.all_reduce(parameter.grad, group=inside[rank.node])
        if rank.local_rank == 0:
            dist.all_reduce(parameter.grad, group=leaders)
        dist.broadcast(parameter.grad, 0)
        parameter.grad /= rank.world_size


def a_node_clears(model: nn.Module, batch: Batch, rank: Any) -> None:
    loss_of(model, batch).backward()
    if rank.node == 1:
        for parameter in model.parameters():
            parameter.grad.zero_()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


class Hierarchy:
    """Averages inside each node first, and then over the nodes."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank
        groups = [dist.new_group([0]), dist.new_group([1, 2, 3])]
        self.inside = groups[rank.node]
        self.across = dist.new_group([0, 1])

    def average(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.inside)
        gradient /= self.rank.local_world_size
        if self.rank.local_rank == 0:
            dist.all_reduce(gradient, group=self.across)
            gradient /= 2
        first = 0 if self.rank.node == 0 else 1
        dist.broadcast(gradient, first, group=self.inside)


def averages_nodes_equally(model: nn.Module, batch: Batch, rank: Any) -> None:
    hierarchy = Hierarchy(rank)
    loss = loss_of(model, batch)
    loss.backward()
    for parameter in model.parameters():
        hierarchy.average(parameter.grad)
