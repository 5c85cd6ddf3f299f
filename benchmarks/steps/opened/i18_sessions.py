"""Next-item recommendation in sessions. The ranks deal the sessions among themselves with a sampler."""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ddp_equivalence import Case

ITEMS, CLICKS, SESSIONS = 27, 5, 10


class NextItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 8)
        self.session = nn.GRU(8, 8, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(ITEMS))

    def forward(self, clicks: Tensor) -> Tensor:
        _, last = self.session(self.items(clicks))
        return last[-1] @ self.items.weight.T + self.bias


def sessions(generator: torch.Generator) -> dict[str, Tensor]:
    clicks = torch.randint(ITEMS, (SESSIONS, CLICKS + 1), generator=generator)
    return {"clicks": clicks[:, :-1].contiguous(), "next": clicks[:, -1].contiguous()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["clicks"]), batch["next"])


class Dealt(Sampler[int]):
    """The sessions of one rank, in an order that all ranks draw alike."""

    def __init__(self, count: int, rank: int, ranks: int, epoch: int = 0) -> None:
        self.count, self.rank, self.ranks, self.epoch = count, rank, ranks, epoch
        self.each = -(-count // ranks)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(
            self.count, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        order += order[: self.each * self.ranks - len(order)]
        return iter(order[self.rank :: self.ranks])

    def __len__(self) -> int:
        return self.each


def step(model, batch, rank):
    dataset = TensorDataset(batch["clicks"], batch["next"])
    sampler = Dealt(len(dataset), rank.rank, rank.world_size)
    ddp = DistributedDataParallel(model)
    for clicks, following in DataLoader(dataset, batch_size=sampler.each, sampler=sampler):
        total = F.cross_entropy(ddp(clicks), following, reduction="sum")
        (total * rank.world_size / len(dataset)).backward()


case = Case(model=NextItem, batch=sessions, loss=loss, layout="1x4", shards="own")
