"""Two-level reduction for nodes of unequal size: inside a node, between leaders, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class Topology:
    nodes: tuple[tuple[int, ...], ...] = ((0,), (1, 2, 3))

    @property
    def leaders(self) -> list[int]:
        return [ranks[0] for ranks in self.nodes]

    def node_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self.nodes) if rank in ranks)


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Linear(6, 5)
        self.item = nn.Linear(4, 5)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user).relu() * self.item(item).relu()).sum(-1) + self.bias


def clicks(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "user": torch.randn(16, 6, generator=generator),
        "item": torch.randn(16, 4, generator=generator),
        "click": (torch.rand(16, generator=generator) < 0.3).double(),
    }


def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(b["user"], b["item"]), b["click"].to(b["user"]))


case = Case(model=TwoTower, batch=clicks, loss=loss, layout="1+3")


class TwoLevelReducer:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rank = dist.get_rank()
        self.node = topology.node_of(self.rank)
        groups = [dist.new_group(list(ranks)) for ranks in topology.nodes]
        self.local = groups[self.node]
        self.between = dist.new_group(topology.leaders)
        self.leader = topology.leaders[self.node]

    def _within_node(self, flat: Tensor) -> None:
        dist.reduce(flat, dst=self.leader, group=self.local)
        flat /= dist.get_world_size(self.local)

    def _between_nodes(self, flat: Tensor) -> None:
        if self.rank == self.leader:
            dist.all_reduce(flat, group=self.between)
            flat /= dist.get_world_size(self.between)

    def __call__(self, flat: Tensor) -> Tensor:
        self._within_node(flat)
        self._between_nodes(flat)
        dist.broadcast(flat, src=self.leader, group=self.local)
        return flat


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    reducer = TwoLevelReducer(Topology())
    loss(model, shard).backward()
    params = list(model.parameters())
    flat = reducer(torch.cat([p.grad.reshape(-1) for p in params]))
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad = g.view_as(p).clone()
