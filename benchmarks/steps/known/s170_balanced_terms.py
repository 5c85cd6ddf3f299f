"""Depth and surface classes from one network, with both losses brought to the same size.

The weight of the second loss is the quotient of the losses. It is a number without a gradient.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

SURFACES = 4
LARGEST_WEIGHT = 50.0

Batch = dict[str, Tensor]


class SceneNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        )
        self.surface = nn.Conv2d(8, SURFACES, 1)
        self.depth = nn.Conv2d(8, 1, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(images)
        return self.surface(features), self.depth(features)[:, 0]


def terms(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    surface, depth = model(batch["images"])
    return F.cross_entropy(surface, batch["surface"]), F.l1_loss(depth, batch["depth"])


def balance(first: Tensor, second: Tensor) -> Tensor:
    return (first.detach() / second.detach()).clamp(max=LARGEST_WEIGHT)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    surface, depth = terms(model, batch)
    return surface + balance(surface, depth) * depth


def make_batch(generator: torch.Generator) -> Batch:
    scale = torch.linspace(0.5, 3, 8)[:, None, None]  # from indoor to outdoor pictures
    return {
        "images": torch.randn(8, 3, 6, 6, generator=generator),
        "surface": torch.randint(SURFACES, (8, 6, 6), generator=generator),
        "depth": scale * torch.rand(8, 6, 6, generator=generator),
    }


case = Case(model=SceneNet, batch=make_batch, loss=loss, layout="2x2")


class SceneTrainer:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.model = DistributedDataParallel(model)
        self.world_size = world_size
        self.log: list[dict[str, float]] = []

    def over_ranks(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value)
        return value / self.world_size

    def train_step(self, batch: Batch) -> None:
        surface, depth = terms(self.model, batch)
        means = {"surface": self.over_ranks(surface), "depth": self.over_ranks(depth)}
        weight = balance(surface, depth)
        (surface + weight * depth).backward()
        means["total"] = means["surface"] + weight * means["depth"]
        self.log.append({name: value.item() for name, value in means.items()})


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    model.train()
    SceneTrainer(model, rank.world_size).train_step(shard)
