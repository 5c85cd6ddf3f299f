"""Hierarchical reduction: inside each node first, then between one leader of each node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, WIDTH, CLASSES, EXAMPLES = 7, 9, 3, 16


@dataclass(frozen=True)
class Topology:
    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def members(self, node: int) -> list[int]:
        first = node * self.per_node
        return list(range(first, first + self.per_node))

    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return list(range(self.world))[: self.nodes]


class HierarchicalReducer:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rank = dist.get_rank()
        self.node = self.rank // topology.per_node
        groups = [dist.new_group(topology.members(node)) for node in range(topology.nodes)]
        self.inside = groups[self.node]
        self.leaders = topology.leaders()
        self.between = dist.new_group(self.leaders)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.inside)
        if self.rank in self.leaders:
            dist.all_reduce(tensor, group=self.between)
        dist.broadcast(tensor, src=self.topology.members(self.node)[0], group=self.inside)

    def average(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.all_reduce(flat)
        flat.div_(self.topology.world)
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(piece.view_as(tensor))


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["features"]), batch["labels"], label_smoothing=0.1)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


class ClusterTrainer:
    def __init__(self, model: nn.Module, topology: Topology) -> None:
        self.model = model
        self.reducer = HierarchicalReducer(topology)

    def step(self, batch: dict[str, Tensor]) -> float:
        self.model.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        self.reducer.average([p.grad for p in self.model.parameters()])
        return value.item()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="2x2")


def step(model, shard, rank):
    ClusterTrainer(model, Topology(nodes=2, per_node=2)).step(shard)
