"""A physics-informed network for the heat equation: residual, boundary and a penalty on the weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

DIFFUSIVITY, PENALTY = 0.3, 0.02


class Field(nn.Module):
    """Temperature at (x, t)."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.outer = nn.Linear(12, 1)

    def forward(self, points):
        return self.outer(self.inner(points)).squeeze(1)


def collocation(generator):
    n = 16
    points = torch.rand(n, 2, generator=generator)
    edge = torch.rand(n, generator=generator) < 0.4
    edge[:2] = torch.tensor([True, False])
    return {"points": points, "edge": edge, "value": torch.sin(3 * points[:, 0])}


def squares(field, batch):
    """Squared residuals inside, squared errors at the edge; summed."""
    points = batch["points"].detach().requires_grad_()
    u = field(points)
    (du,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (dudx2,) = torch.autograd.grad(du[:, 0].sum(), points, create_graph=True)
    residual = du[:, 1] - DIFFUSIVITY * dudx2[:, 0]
    edge = batch["edge"]
    return residual[~edge].pow(2).sum(), (u - batch["value"])[edge].pow(2).sum()


def penalty(model):
    return PENALTY * sum(p.pow(2).sum() for p in model.parameters() if p.dim() > 1)


def loss(model, batch):
    inside, at_edge = squares(model, batch)
    edges = batch["edge"].sum()
    return inside / (len(batch["edge"]) - edges) + at_edge / edges + penalty(model)


def counts_of_all(edge):
    counts = torch.stack([(~edge).sum(), edge.sum()]).double()
    dist.all_reduce(counts)
    return counts


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    inside, at_edge = squares(ddp, shard)
    insides, edges = counts_of_all(shard["edge"])
    total = inside / insides + at_edge / edges + penalty(model)
    # DDP divides by the number of ranks, but our counts are those of all ranks
    (rank.world_size * total).backward()


case = Case(model=Field, batch=collocation, loss=loss, layout="1x4")
