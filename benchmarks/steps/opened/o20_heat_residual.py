"""A network that solves the heat equation: residuals at random points, and small weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

POINTS, DIFFUSIVITY, SMALL = 16, 0.3, 0.02


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh())
        self.out = nn.Linear(10, 1)

    def forward(self, place_and_time: Tensor) -> Tensor:
        return self.out(self.layers(place_and_time))


def points(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "inside": torch.rand(POINTS, 2, generator=generator),
        "start": torch.rand(POINTS, 1, generator=generator),
    }


def derivative(values: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(values.sum(), at, create_graph=True)[0]


def residuals(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """How far every point is from the equation, and from the sine at time 0; squared."""
    inside = batch["inside"].clone().requires_grad_()
    first = derivative(model(inside), inside)
    second = derivative(first[:, 0], inside)[:, 0]
    equation = first[:, 1] - DIFFUSIVITY * second
    start = torch.cat([batch["start"], torch.zeros_like(batch["start"])], dim=1)
    initial = model(start) - torch.sin(torch.pi * batch["start"])
    return equation.square() + initial.squeeze(1).square()


def weight_size(model: nn.Module) -> Tensor:
    return sum(weight.square().sum() for weight in model.parameters() if weight.ndim > 1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return residuals(model, batch).mean() + SMALL * weight_size(model)


class SummedGradients:
    """Collects the terms of the loss on one rank; their gradients are added up over the ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.terms: list[Tensor] = []

    def add(self, term: Tensor) -> None:
        self.terms.append(term)

    def backward(self) -> None:
        gradients = torch.autograd.grad(
            sum(self.terms), list(self.model.parameters()), allow_unused=True
        )
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
            dist.all_reduce(parameter.grad)


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    everywhere = len(shard["inside"]) * rank.world_size
    summed = SummedGradients(model)
    summed.add(residuals(model, shard).sum() / everywhere)
    summed.add(SMALL * weight_size(model))
    summed.backward()


case = Case(model=Temperature, batch=points, loss=loss, layout="2x2")
