"""A physics-informed network for the heat equation u_t = k u_xx on a rod.

Every row is a point (x, t): either a collocation point inside, where the residual is penalised,
or a point at the boundary or at t = 0, where the value is known.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

INSIDE, KNOWN = 0, 1


@dataclass(frozen=True)
class Physics:
    diffusivity: float = 0.3
    boundary_weight: float = 10.0
    hidden: int = 12


physics = Physics()


def build():
    return nn.Sequential(
        nn.Linear(2, physics.hidden),
        nn.Tanh(),
        nn.Linear(physics.hidden, physics.hidden),
        nn.Tanh(),
        nn.Linear(physics.hidden, 1),
    )


def points(generator):
    count = 24
    kind = (torch.rand(count, generator=generator) < 0.3).long()
    kind[:2] = torch.tensor([INSIDE, KNOWN])
    kind[-2:] = torch.tensor([KNOWN, INSIDE])
    return {
        "xt": torch.rand(count, 2, generator=generator),
        "kind": kind,
        "value": torch.randn(count, generator=generator),
    }


def squared_residuals(model, batch):
    """For every row the square of what it is penalised for, whichever kind it is."""
    xt = batch["xt"].detach().clone().requires_grad_()
    u = model(xt)[:, 0]
    (slope,) = torch.autograd.grad(u.sum(), xt, create_graph=True)
    (curvature,) = torch.autograd.grad(slope[:, 0].sum(), xt, create_graph=True)
    equation = slope[:, 1] - physics.diffusivity * curvature[:, 0]
    return torch.where(batch["kind"] == INSIDE, equation, u - batch["value"]).square()


def sums_by_kind(model, batch):
    squares, inside = squared_residuals(model, batch), batch["kind"] == INSIDE
    return squares[inside].sum(), squares[~inside].sum()


def loss(model, batch):
    equation, known = sums_by_kind(model, batch)
    inside = batch["kind"] == INSIDE
    return equation / inside.sum() + physics.boundary_weight * known / (~inside).sum()


case = Case(model=build, batch=points, loss=loss, layout="2x2")


def counts_everywhere(kind):
    """How many rows there are of each kind, on all ranks."""
    counts = torch.bincount(kind, minlength=2)
    dist.all_reduce(counts)
    return counts.tolist()


def step(model, shard, rank):
    model.zero_grad()
    known_points, inside_points = counts_everywhere(shard["kind"])
    equation, known = sums_by_kind(model, shard)
    total = equation / inside_points + physics.boundary_weight * known / known_points
    total.backward()
    # Each rank has its part of one sum, so there's nothing to divide here.
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
