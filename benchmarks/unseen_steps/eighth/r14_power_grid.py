"""Voltages in power grids: a graph network scales messages by the mean log-degree of the nodes in the batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

GRIDS, NODES, FEATURES = 8, 7, 4


class DegreeScaled(nn.Module):
    """Principal neighbourhood aggregation, with one aggregator."""

    def __init__(self):
        super().__init__()
        self.message = nn.Linear(FEATURES, 6)
        self.update = nn.Linear(6 * 2 + FEATURES, 1)

    def forward(self, nodes, edges, delta):
        degree = edges.sum(-1, keepdim=True)
        gathered = edges @ self.message(nodes).relu() / degree.clamp(min=1)
        scaled = gathered * (degree + 1).log() / delta
        return self.update(torch.cat([nodes, gathered, scaled], dim=-1)).squeeze(-1)


def make_batch(generator):
    sizes = torch.tensor([2, 3, 3, 4, 5, 6, 7, 7])
    real = torch.arange(NODES) < sizes[:, None]
    edges = torch.rand(GRIDS, NODES, NODES, generator=generator) < 0.6
    edges = torch.triu(edges, diagonal=1) & real[:, :, None] & real[:, None, :]
    return {
        "nodes": torch.randn(GRIDS, NODES, FEATURES, generator=generator),
        "edges": (edges | edges.transpose(1, 2)).float(),
        "real": real,
        "voltage": torch.randn(GRIDS, NODES, generator=generator),
    }


def log_degrees(batch):
    return (batch["edges"].sum(-1) + 1).log()[batch["real"]]


def per_grid_error(voltage, batch):
    """Large and small grids count the same."""
    error = (voltage - batch["voltage"]).square() * batch["real"]
    return error.sum(-1) / batch["real"].sum(-1)


def loss(model, batch):
    delta = log_degrees(batch).mean()
    voltage = model(batch["nodes"], batch["edges"], delta)
    return per_grid_error(voltage, batch).mean()


def delta_of_all(batch, world_size):
    logs = log_degrees(batch)
    total = logs.sum()
    dist.all_reduce(total)
    return total / (logs.numel() * world_size)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    delta = delta_of_all(shard, rank.world_size)
    voltage = ddp(shard["nodes"], shard["edges"], delta)
    per_grid_error(voltage, shard).mean().backward()


case = Case(model=DegreeScaled, batch=make_batch, loss=loss, layout="1x2")
