"""Default risk from a table of applicants, with a sampler that deals shuffled rows to the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ddp_equivalence import Case

ROWS, NUMBERS, KINDS = 24, 5, 6


class Scorecard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Embedding(KINDS, 3)
        self.body = nn.Sequential(nn.Linear(NUMBERS + 3, 10), nn.SiLU(), nn.Linear(10, 1))

    def forward(self, numbers: Tensor, kind: Tensor) -> Tensor:
        return self.body(torch.cat([numbers, self.kind(kind)], dim=1)).squeeze(1)


def applicants(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "numbers": torch.randn(ROWS, NUMBERS, generator=generator),
        "kind": torch.randint(0, KINDS, (ROWS,), generator=generator),
        "defaulted": (torch.rand(ROWS, generator=generator) < 0.3).double(),
    }


def penalised(logits: Tensor, defaulted: Tensor) -> Tensor:
    """A missed default costs three times a refused good applicant."""
    weight = torch.tensor(3.0, dtype=logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, defaulted, pos_weight=weight)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return penalised(model(batch["numbers"], batch["kind"]), batch["defaulted"])


class ShuffledPart(Sampler[int]):
    """Every rank walks through its own part of one shuffled order of the rows."""

    def __init__(self, rows: int, rank: int, world: int, seed: int = 17) -> None:
        self.rows, self.rank, self.world = rows, rank, world
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows // self.world

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch + self.rank)
        order = torch.randperm(self.rows, generator=generator).tolist()
        return iter(order[self.rank :: self.world])


def step(model: nn.Module, table: dict[str, Tensor], rank) -> None:
    dataset = TensorDataset(table["numbers"], table["kind"], table["defaulted"])
    sampler = ShuffledPart(len(dataset), rank.rank, rank.world_size)
    sampler.set_epoch(3)
    loader = DataLoader(dataset, batch_size=len(sampler), sampler=sampler, drop_last=True)
    ddp = DistributedDataParallel(model)
    for numbers, kind, defaulted in loader:
        penalised(ddp(numbers, kind), defaulted).backward()


case = Case(model=Scorecard, batch=applicants, loss=loss, layout="1x4", shards="own")
