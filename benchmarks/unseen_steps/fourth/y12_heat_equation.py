"""A physics-informed network for the heat equation u_t = k u_xx on a rod."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

COLLOCATION_POINTS, BOUNDARY_POINTS = 24, 7

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Physics:
    conductivity: float = 0.4
    boundary_weight: float = 10.0


class Solution(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.readout = nn.Linear(width, 1, bias=False)

    def forward(self, points: Tensor) -> Tensor:
        return self.readout(self.net(points)).squeeze(-1)


def derivatives(output: Tensor, points: Tensor) -> Tensor:
    """The gradient of every output with respect to its own point."""
    (gradient,) = torch.autograd.grad(output.sum(), points, create_graph=True)
    return gradient


def residual_loss(model: nn.Module, points: Tensor, physics: Physics) -> Tensor:
    points = points.detach().requires_grad_()
    first = derivatives(model(points), points)
    second = derivatives(first[:, 0], points)
    return (first[:, 1] - physics.conductivity * second[:, 0]).square().mean()


def boundary_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Both ends of the rod are held at zero, and the initial temperature is known."""
    return (model(batch["boundary"]) - batch["temperature"]).square().mean()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    physics = Physics()
    residual = residual_loss(model, batch["interior"], physics)
    return residual + physics.boundary_weight * boundary_loss(model, batch)


def make_batch(generator: torch.Generator) -> Batch:
    """Points are (x, t); those of the boundary are few, and the same on every rank."""
    boundary = torch.rand(BOUNDARY_POINTS, 2, generator=generator)
    boundary[:2, 0], boundary[2:4, 0], boundary[4:, 1] = 0.0, 1.0, 0.0
    return {
        "interior": torch.rand(COLLOCATION_POINTS, 2, generator=generator),
        "boundary": boundary,
        "temperature": torch.sin(torch.pi * boundary[:, 0]) * (boundary[:, 1] == 0),
    }


case = Case(
    model=Solution,
    batch=make_batch,
    loss=loss,
    layout="1x3",
    batch_dims={"interior": 0, "boundary": None, "temperature": None},
)


class Solver:
    """Collocation points are dealt to the ranks."""

    def __init__(self, model: nn.Module, rank: Rank, physics: Physics) -> None:
        self.rank = rank
        self.physics = physics
        self.model = DistributedDataParallel(model)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"residual": residual_loss(self.model, batch["interior"], self.physics)}
        if self.rank == 0:
            boundary = boundary_loss(self.model, batch)
            terms["boundary"] = self.physics.boundary_weight * boundary
        return terms

    def step(self, batch: Batch) -> dict[str, float]:
        terms = self.terms(batch)
        torch.stack(list(terms.values())).sum().backward()
        return {name: term.item() for name, term in terms.items()}


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Solver(model, rank, Physics()).step(shard)
