"""A physics-informed network for the heat equation. Points with large residuals weigh more."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

POINTS = 16
DIFFUSIVITY, FLOOR = 0.3, 0.1


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points):
        return self.net(points)[:, 0]


def make_batch(generator):
    inner = torch.rand(POINTS, 2, generator=generator)
    inner[:, 0] = inner[:, 0].sort().values * 3
    start = torch.rand(POINTS, 2, generator=generator)
    start[:, 1] = 0
    source = torch.exp(inner[:, 0])
    return {"inner": inner, "source": source, "start": start, "initial": torch.sin(3 * start[:, 0])}


def residuals(model, points, source):
    points = points.clone().requires_grad_()
    u = model(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (curvature,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
    return slope[:, 1] - DIFFUSIVITY * curvature[:, 0] - source


def attention(residual, largest):
    """From FLOOR to 1, in proportion to the residual; not differentiated."""
    return FLOOR + (1 - FLOOR) * residual.abs().detach() / largest


def physics(residual, weight):
    return (weight * residual.square()).mean()


def initial_condition(model, batch):
    return (model(batch["start"]) - batch["initial"]).square().mean()


def loss(model, batch):
    residual = residuals(model, batch["inner"], batch["source"])
    weight = attention(residual, residual.abs().max().detach())
    return physics(residual, weight) + 10 * initial_condition(model, batch)


class Reducer:
    """Averages anything over the ranks that has a ``grad``."""

    def __init__(self, world_size):
        self.world_size = world_size

    def __call__(self, parameters):
        parameters = [p for p in parameters if p.grad is not None]
        flat = nn.utils.parameters_to_vector([p.grad for p in parameters])
        dist.all_reduce(flat)
        flat.div_(self.world_size)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            parameter.grad = part.view_as(parameter).clone()


def step(model, shard, rank):
    residual = residuals(model, shard["inner"], shard["source"])
    largest = residual.detach().abs().max()
    weight = attention(residual, largest)
    total = physics(residual, weight) + 10 * initial_condition(model, shard)
    total.backward()
    Reducer(rank.world_size)(model.parameters())


case = Case(model=Field, batch=make_batch, loss=loss, layout="1x2")
