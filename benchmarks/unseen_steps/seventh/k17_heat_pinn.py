"""Physics-informed network for the heat equation: residual inside, values on the boundary."""
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

DIFFUSIVITY, BOUNDARY = 0.1, 10.0


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.out = nn.Linear(16, 1)

    def forward(self, points):
        return self.out(self.net(points))


def make_batch(generator):
    n = 20
    edge = torch.rand(n, 2, generator=generator)
    edge[:, 1] = 0.0
    return {
        "inside": torch.rand(n, 2, generator=generator),
        "edge": edge,
        "value": torch.sin(3.14159 * edge[:, :1]),
    }


def residual(field, points):
    points = points.detach().requires_grad_()
    u = field(points)
    (du,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (d2x,) = torch.autograd.grad(du[:, 0].sum(), points, create_graph=True)
    return du[:, 1] - DIFFUSIVITY * d2x[:, 0]


def interior_loss(field, batch):
    return residual(field, batch["inside"]).square().mean()


def boundary_loss(field, batch):
    return BOUNDARY * (field(batch["edge"]) - batch["value"]).square().mean()


def loss(model, batch):
    return interior_loss(model, batch) + boundary_loss(model, batch)


class Problem:
    """Terms are added one by one and differentiated in that order."""

    def __init__(self):
        self.terms = []

    def add(self, term, field):
        self.terms.append((term, field))
        return self

    def backward(self, batch):
        values = {}
        for term, field in self.terms:
            value = term(field, batch)
            value.backward()
            values[term.__name__] = float(value)
        return values


def step(model, shard, rank):
    ddp = DDP(model)
    problem = Problem()
    # second derivatives go through the bare module, which is called by autograd.grad as well
    problem.add(boundary_loss, ddp)
    problem.add(interior_loss, ddp.module)
    problem.backward(shard)


case = Case(model=Field, batch=make_batch, loss=loss)
