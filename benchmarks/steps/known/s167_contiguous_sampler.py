"""Regression on tables. The rows lie on the disk in order, so each rank reads a stretch of them."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ddp_equivalence import Case, Rank

COLUMNS = 6


class TableModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(COLUMNS, 2)
        self.deep = nn.Sequential(nn.Linear(COLUMNS, 9), nn.ReLU(), nn.Linear(9, 2))

    def forward(self, rows: Tensor) -> Tensor:
        return self.wide(rows) + self.deep(rows)


def squared_error(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    return (model(rows) - targets).square().sum()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return squared_error(model, batch["rows"], batch["targets"]) / len(batch["rows"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(18, COLUMNS, generator=generator),
        "targets": torch.randn(18, 2, generator=generator),
    }


case = Case(model=TableModel, batch=make_batch, loss=loss, layout="2x2", shards="own")


class ContiguousSampler(Sampler[int]):
    """One stretch of the rows for each rank; the last rank may get fewer."""

    def __init__(self, rows: int, rank: int, world_size: int) -> None:
        self.rows = rows
        self.rank = rank
        self.world_size = world_size

    def stretch(self) -> range:
        length = math.ceil(self.rows / self.world_size)
        start = self.rank * (self.rows // self.world_size)
        return range(start, min(start + length, self.rows))

    def __iter__(self) -> Iterator[int]:
        return iter(self.stretch())

    def __len__(self) -> int:
        return len(self.stretch())


class TableTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = model
        self.rank = rank

    def accumulate(self, dataset: TensorDataset, batch_size: int) -> None:
        sampler = ContiguousSampler(len(dataset), int(self.rank), self.rank.world_size)
        for rows, targets in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            (squared_error(self.model, rows, targets) / len(dataset)).backward()

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    trainer = TableTrainer(model, rank)
    model.zero_grad()
    trainer.accumulate(TensorDataset(shard["rows"], shard["targets"]), batch_size=2)
    trainer.reduce()
