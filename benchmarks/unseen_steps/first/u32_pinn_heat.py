"""Physics-informed network for the heat equation: PDE residual at collocation points, data misfit at boundary
and initial points. Each rank accumulates over chunks of its points; terms are divided by global point counts."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

NU, BOUNDARY_WEIGHT, CHUNKS = 0.3, 4.0, 3


class Field(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.out = nn.Linear(width, 1)

    def forward(self, points):
        h = torch.tanh(self.inp(points))
        for layer in self.hidden:
            h = h + torch.tanh(layer(h))
        return self.out(h)


def build_model():
    return Field()


def make_batch(generator):
    n = 24
    points = torch.rand(n, 2, generator=generator)
    boundary = torch.arange(n) % 4 == 1
    points[boundary, 1] = 0.0
    return {
        "points": points,
        "boundary": boundary,
        "value": torch.sin(torch.pi * points[:, :1]),
    }


def pde_residual(model, points):
    """u_t - nu * u_xx at the given (x, t)."""
    points = points.detach().requires_grad_(True)
    u = model(points)
    first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
    u_x, u_t = first[:, :1], first[:, 1:]
    u_xx = torch.autograd.grad(u_x.sum(), points, create_graph=True)[0][:, :1]
    return u_t - NU * u_xx


def point_terms(model, batch):
    boundary = batch["boundary"]
    inside = pde_residual(model, batch["points"][~boundary]).pow(2).sum()
    misfit = model(batch["points"][boundary]) - batch["value"][boundary]
    return inside, misfit.pow(2).sum()


def loss(model, batch):
    inside, edge = point_terms(model, batch)
    boundary = batch["boundary"]
    return inside / (~boundary).sum() + BOUNDARY_WEIGHT * edge / boundary.sum()


def global_counts(boundary):
    counts = torch.stack([(~boundary).sum(), boundary.sum()])
    dist.all_reduce(counts)
    return counts.tolist()


def reduce_gradients(model):
    """The terms are already divided by global counts, so the ranks' gradients add up."""
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def chunked(shard, chunks):
    names = list(shard)
    for pieces in zip(*(shard[name].chunk(chunks) for name in names)):
        yield dict(zip(names, pieces))


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    n_inside, n_edge = global_counts(shard["boundary"])
    for chunk in chunked(shard, CHUNKS):
        inside, edge = point_terms(model, chunk)
        value = inside / n_inside + BOUNDARY_WEIGHT * edge / n_edge
        value.backward()
        reduce_gradients(model)
