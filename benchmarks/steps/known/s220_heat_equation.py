"""A network that solves the heat equation: u_t = k u_xx inside a rod, and given values at its ends.

Every example is one point inside and one at an end or at the start.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]
CONDUCTIVITY, EDGE_WEIGHT = 0.3, 5.0


class Field(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.temperature = nn.Linear(width, 1)

    def forward(self, place_and_time: Tensor) -> Tensor:
        return self.temperature(self.layers(place_and_time))[:, 0]


def slope(field: Tensor, points: Tensor) -> Tensor:
    return torch.autograd.grad(field.sum(), points, create_graph=True)[0]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    points = batch["inside"].clone().requires_grad_()
    first = slope(model(points), points)
    second = slope(first[:, 0], points)
    residual = first[:, 1] - CONDUCTIVITY * second[:, 0]
    return residual.square().mean() + EDGE_WEIGHT * F.mse_loss(model(batch["edge"]), batch["value"])


def make_batch(generator: torch.Generator) -> Batch:
    edge = torch.rand(12, 2, generator=generator)
    edge[::3, 0], edge[1::3, 0], edge[2::3, 1] = 0.0, 1.0, 0.0
    return {
        "inside": torch.rand(12, 2, generator=generator),
        "edge": edge,
        "value": (torch.pi * edge[:, 0]).sin(),
    }


case = Case(model=Field, batch=make_batch, loss=loss, layout="1x2")


def derivatives(field: Tensor, points: Tensor, axis: int, orders: int) -> list[Tensor]:
    """The slopes of the field, then the slopes of its slope along the axis, and so on."""
    found = []
    for order in range(1, orders + 1):
        slopes = torch.autograd.grad(
            field.sum(),
            points,
            retain_graph=True,
            create_graph=order < orders,
        )[0]
        found.append(slopes)
        field = slopes[:, axis]
    return found


class Solver:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)

    def residual(self, inside: Tensor) -> Tensor:
        points = inside.clone().requires_grad_()
        first, second = derivatives(self.ddp(points), points, axis=0, orders=2)
        return first[:, 1] - CONDUCTIVITY * second[:, 0]

    def improve(self, batch: Batch) -> None:
        inside = self.residual(batch["inside"]).square().mean()
        edge = F.mse_loss(self.ddp(batch["edge"]), batch["value"])
        (inside + EDGE_WEIGHT * edge).backward()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Solver(model).improve(shard)
