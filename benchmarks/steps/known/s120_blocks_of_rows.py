"""Tabular data is read in blocks: each rank reads consecutive rows, and the first read one more."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 11)
        self.out = nn.Linear(11, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.out(torch.sigmoid(self.hidden(self.norm(rows))))


def squared_error(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    return (model(rows) - targets).square().sum(dim=1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return squared_error(model, batch["rows"], batch["targets"]).mean()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(14, 6, generator=generator),
        "targets": torch.randn(14, 2, generator=generator),
    }


case = Case(model=Table, batch=make_batch, loss=loss, layout="1x4", shards="own")


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a table."""

    start: int
    stop: int

    @classmethod
    def of(cls, rank: int, world_size: int, rows: int) -> "Block":
        each, extra = divmod(rows, world_size)
        start = rank * each + min(rank, extra)
        return cls(start, start + each + int(rank <= extra))

    def read(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: column[self.start : self.stop] for name, column in columns.items()}


class Reader:
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns
        self.rows = len(columns["rows"])

    def share_of(self, rank: Rank) -> dict[str, Tensor]:
        return Block.of(int(rank), rank.world_size, self.rows).read(self.columns)


def step(model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
    reader = Reader(batch)
    share = reader.share_of(rank)
    model.zero_grad()
    errors = squared_error(model, share["rows"], share["targets"])
    (errors.sum() / reader.rows).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
