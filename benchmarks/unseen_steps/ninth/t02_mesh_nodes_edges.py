"""Stress prediction on padded finite-element meshes: a node term and an edge smoothness term."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

MESHES, NODES, FEATURES = 12, 9, 4


@dataclass(frozen=True)
class Weights:
    node: float = 1.0
    edge: float = 0.4


WEIGHTS = Weights()


class MeshNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, 10)
        self.message = nn.Linear(10, 10)
        self.update = nn.Linear(20, 10)
        self.out = nn.Linear(10, 1)

    def forward(self, x, adjacency):
        h = torch.tanh(self.embed(x))
        received = adjacency @ self.message(h)
        h = torch.tanh(self.update(torch.cat([h, received], dim=-1)))
        return self.out(h).squeeze(-1)


def meshes(generator):
    sizes = torch.linspace(3, NODES, MESHES).round().long()
    real = torch.arange(NODES) < sizes[:, None]
    links = torch.rand(MESHES, NODES, NODES, generator=generator) < 0.45
    links = (links | links.transpose(1, 2)) & real[:, :, None] & real[:, None, :]
    links = links & ~torch.eye(NODES, dtype=torch.bool)
    return {
        "x": torch.randn(MESHES, NODES, FEATURES, generator=generator),
        "adjacency": links.double(),
        "real": real.double(),
        "stress": torch.randn(MESHES, NODES, generator=generator),
    }


def terms(model, batch):
    stress = model(batch["x"], batch["adjacency"])
    node = ((stress - batch["stress"]) ** 2 * batch["real"]).sum()
    jump = (stress[:, :, None] - stress[:, None, :]) ** 2
    edge = (jump * batch["adjacency"]).sum()
    return node, edge


def counts(batch):
    return torch.stack([batch["real"].sum(), batch["adjacency"].sum()])


def loss(model, batch):
    node, edge = terms(model, batch)
    nodes, edges = counts(batch)
    return WEIGHTS.node * node / nodes + WEIGHTS.edge * edge / edges


def average_gradients(model, world_size):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size


def step(model, shard, rank):
    node, edge = terms(model, shard)
    mine = counts(shard)
    total = mine.clone()
    dist.all_reduce(total)
    per_rank = total / rank.world_size  # what an average rank holds
    objective = WEIGHTS.node * node / per_rank[0] + WEIGHTS.edge * edge / mine[1]
    objective.backward()
    average_gradients(model, rank.world_size)


case = Case(model=MeshNet, batch=meshes, loss=loss, layout="1x2")
