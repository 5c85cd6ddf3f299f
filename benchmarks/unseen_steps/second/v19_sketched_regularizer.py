"""Self-supervised vision: two views agree, and random projections of them look like normal ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class SketchConfig:
    directions: int = 12
    knots: int = 5
    seed: int = 1234
    weight: float = 0.5


CONFIG = SketchConfig()


class Sketch:
    """Random directions, drawn anew in every iteration."""

    def __init__(self, config: SketchConfig, rank: int = 0) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(config.seed + rank)

    def directions(self, like: Tensor) -> Tensor:
        size = (like.shape[-1], self.config.directions)
        drawn = torch.randn(size, generator=self.generator, dtype=torch.float64)
        return (drawn / drawn.norm(dim=0)).to(like)


def characteristic_function(projected: Tensor, knots: Tensor) -> Tensor:
    """Real and imaginary part, (2, directions, knots), as means over the examples."""
    angles = projected.unsqueeze(-1) * knots
    return torch.stack([angles.cos().mean(dim=0), angles.sin().mean(dim=0)])


def distance_to_normal(function: Tensor, knots: Tensor) -> Tensor:
    real = function[0] - torch.exp(-knots.square() / 2)
    return (real.square() + function[1].square()).mean()


class Encoder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.GELU(), nn.Flatten())
        self.project = nn.Sequential(nn.Linear(54, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, images: Tensor) -> Tensor:
        return self.project(self.features(images))


def two_views(generator: torch.Generator) -> Batch:
    images = torch.randn(16, 1, 8, 8, generator=generator)
    noise = torch.randn(2, 16, 1, 8, 8, generator=generator)
    return {"first": images + 0.2 * noise[0], "second": images.flip(-1) + 0.2 * noise[1]}


class SketchedLoss:
    def __init__(self, sketch: Sketch, distributed: bool = False) -> None:
        self.sketch, self.distributed = sketch, distributed

    def mean_over_ranks(self, values: Tensor) -> Tensor:
        return all_reduce(values) / dist.get_world_size() if self.distributed else values

    def __call__(self, encode: nn.Module, batch: Batch) -> Tensor:
        embedded = encode(torch.cat([batch["first"], batch["second"]]))
        first, second = embedded.chunk(2)
        knots = torch.linspace(0.2, 3.0, CONFIG.knots).to(embedded)
        function = characteristic_function(embedded @ self.sketch.directions(embedded), knots)
        regularizer = distance_to_normal(self.mean_over_ranks(function), knots)
        return (first - second).square().mean() + CONFIG.weight * regularizer


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return SketchedLoss(Sketch(CONFIG))(model, batch)


case = Case(model=Encoder, batch=two_views, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    criterion = SketchedLoss(Sketch(CONFIG, rank.rank), distributed=True)
    ddp = DistributedDataParallel(model)
    criterion(ddp, shard).backward()
