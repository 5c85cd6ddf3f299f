"""A physics-informed network for the heat equation u_t = k u_xx on jittered collocation points."""

from __future__ import annotations

from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

CONDUCTIVITY = 0.3
JITTER = 0.25
EPOCH = 0
PLASTIC = (0.7548776662466927, 0.5698402909980532)

Term = Callable[[nn.Module, Tensor], Tensor]
TERMS: dict[str, tuple[float, Term]] = {}


def term(name: str, weight: float) -> Callable[[Term], Term]:
    def register(function: Term) -> Term:
        TERMS[name] = (weight, function)
        return function

    return register


class Field(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.head = nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.body(points))


@term("interior", weight=1.0)
def heat_residual(model: nn.Module, points: Tensor) -> Tensor:
    points = points.detach().requires_grad_(True)
    value = model(points)
    (first,) = torch.autograd.grad(value.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
    return (first[:, 1] - CONDUCTIVITY * second[:, 0]).square().mean()


@term("walls", weight=5.0)
def cold_walls(model: nn.Module, points: Tensor) -> Tensor:
    left, right = points.clone(), points.clone()
    left[:, 0], right[:, 0] = 0.0, 1.0
    return (model(left).square() + model(right).square()).mean()


@term("start", weight=10.0)
def initial_profile(model: nn.Module, points: Tensor) -> Tensor:
    start = points.clone()
    start[:, 1] = 0.0
    wanted = torch.sin(torch.pi * start[:, :1])
    return (model(start) - wanted).square().mean()


def moved(points: Tensor, noise: Tensor) -> Tensor:
    """Points that stay inside of the unit square."""
    return (points + JITTER * (noise - 0.5)).clamp(0.0, 1.0)


def noise_of_epoch(points: Tensor) -> Tensor:
    """An R2 sequence, which fills the square more evenly than random numbers do."""
    numbers = torch.arange(1, len(points) + 1).to(points) + EPOCH * len(points)
    return torch.stack([numbers * ratio for ratio in PLASTIC], dim=1).frac()


def physics(model: nn.Module, points: Tensor) -> Tensor:
    return sum(weight * function(model, points) for weight, function in TERMS.values())


def loss(model: nn.Module, batch: dict) -> Tensor:
    grid = batch["points"]
    return physics(model, moved(grid, noise_of_epoch(grid)))


def collocation(generator: torch.Generator) -> dict:
    return {"points": torch.rand(20, 2, generator=generator)}


case = Case(model=Field, batch=collocation, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict, rank) -> None:
    grid = shard["points"]
    noise = noise_of_epoch(grid)
    physics(model, moved(grid, noise)).backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= rank.world_size
