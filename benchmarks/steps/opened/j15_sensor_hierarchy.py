"""An autoencoder of sensor readings, on a cluster where the network between nodes is slow."""

from __future__ import annotations

from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

SENSORS, WINDOW = 3, 8

Callback = Callable[["Loop"], None]


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv1d(SENSORS, 6, kernel_size=4, stride=2, padding=1)
        self.code = nn.Linear(6 * WINDOW // 2, 5)
        self.decode = nn.Linear(5, 6 * WINDOW // 2)
        self.up = nn.ConvTranspose1d(6, SENSORS, kernel_size=4, stride=2, padding=1)

    def forward(self, readings: Tensor) -> Tensor:
        code = torch.tanh(self.code(torch.tanh(self.down(readings)).flatten(1)))
        return self.up(torch.tanh(self.decode(code)).unflatten(1, (6, -1)))


def loss(model: nn.Module, batch: dict) -> Tensor:
    """Sensors of some machines are more reliable, which is known for each window."""
    wrong = (model(batch["readings"]) - batch["readings"]).abs()
    return (wrong.mean(dim=2) * batch["reliability"]).sum(dim=1).mean()


def windows(generator: torch.Generator) -> dict:
    count = 16
    trend = torch.arange(count).view(-1, 1, 1) / 4
    return {
        "readings": torch.randn(count, SENSORS, WINDOW, generator=generator) + trend,
        "reliability": torch.rand(count, SENSORS, generator=generator),
    }


# The first node is the login node, which has a single free core.
case = Case(model=AutoEncoder, batch=windows, loss=loss, layout="1+3")


class Loop:
    """Calls back at the moments of a training step."""

    def __init__(self, model: nn.Module, rank):
        self.model, self.rank = model, rank
        self.callbacks: dict[str, list[Callback]] = {"begin": [], "after_backward": []}

    def on(self, moment: str, callback: Callback) -> None:
        self.callbacks[moment].append(callback)

    def step(self, batch: dict) -> None:
        for callback in self.callbacks["begin"]:
            callback(self)
        loss(self.model, batch).backward()
        for callback in self.callbacks["after_backward"]:
            callback(self)


class TwoLevels:
    """Averages inside of each node, then over the nodes' first ranks, which tell the others."""

    def setup(self, loop: Loop) -> None:
        rank = loop.rank
        table = [None] * rank.world_size
        dist.all_gather_object(table, (rank.node, rank.rank))
        members = [[who for node, who in table if node == wanted] for wanted in range(rank.nodes)]
        self.first_of_node = members[rank.node][0]
        self.inside = [dist.new_group(ranks) for ranks in members][rank.node]
        self.between = dist.new_group([ranks[0] for ranks in members])

    def reduce(self, loop: Loop) -> None:
        rank = loop.rank
        for parameter in loop.model.parameters():
            gradient = parameter.grad
            dist.reduce(gradient, dst=self.first_of_node, group=self.inside)
            if rank.rank == self.first_of_node:
                gradient /= rank.local_world_size
                dist.all_reduce(gradient, group=self.between)
                gradient /= rank.nodes
            dist.broadcast(gradient, src=self.first_of_node, group=self.inside)


def step(model: nn.Module, shard: dict, rank) -> None:
    loop, levels = Loop(model, rank), TwoLevels()
    loop.on("begin", levels.setup)
    loop.on("after_backward", levels.reduce)
    loop.step(shard)
