"""Regression on image tiles, read from one store by all ranks, with a sampler of our own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case, Rank

TILES = 14

Store = dict[str, Tensor]


class TileDataset(Dataset[Store]):
    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store["tiles"])

    def __getitem__(self, index: int) -> Store:
        return {name: values[index] for name, values in self.store.items()}


class RankSampler(Sampler[int]):
    """Deals the tiles to the ranks in turn."""

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        self.size, self.rank, self.world_size = size, rank, world_size

    def __iter__(self) -> Iterator[int]:
        indices = list(range(self.size))
        total = math.ceil(self.size / self.world_size) * self.world_size
        indices += indices[: total - self.size]
        yield from indices[self.rank :: self.world_size]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.Mish(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def tiles(generator: torch.Generator) -> Store:
    return {
        "tiles": torch.randn(TILES, 2, 5, 5, generator=generator),
        "measured": torch.randn(TILES, 3, generator=generator),
    }


def summed_error(model: nn.Module, batch: Store) -> Tensor:
    return F.smooth_l1_loss(model(batch["tiles"]), batch["measured"], reduction="sum")


def loss(model: nn.Module, batch: Store) -> Tensor:
    return summed_error(model, batch) / len(batch["tiles"])


class TileTrainer:
    def __init__(self, model: nn.Module, dataset: TileDataset, rank: int, world_size: int) -> None:
        self.model, self.dataset = model, dataset
        sampler = RankSampler(len(dataset), rank, world_size)
        self.loader = DataLoader(dataset, batch_size=2, sampler=sampler)

    def sum_gradients(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)

    def run(self) -> None:
        for batch in self.loader:
            (summed_error(self.model, batch) / len(self.dataset)).backward()
        self.sum_gradients()


case = Case(model=build_model, batch=tiles, loss=loss, layout="2x2", shards="own")


def step(model: nn.Module, store: Store, rank: Rank) -> None:
    TileTrainer(model, TileDataset(store), rank.rank, rank.world_size).run()
