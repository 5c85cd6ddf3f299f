"""Claim frequencies of motor insurance: Poisson regression with exposure as an offset.

Policies are dealt like cards. The last round is filled up with policies from the start, so that
all workers do the same number of rounds; these fillers must not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case, Rank

POLICIES, COVARIATES = 10, 6


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(COVARIATES, 8), nn.Softplus(), nn.Linear(8, 1))


def policies(generator: torch.Generator) -> dict[str, Tensor]:
    exposure = 0.1 + 0.9 * torch.rand(POLICIES, generator=generator)
    return {
        "covariates": torch.randn(POLICIES, COVARIATES, generator=generator),
        "exposure": exposure,
        "claims": torch.poisson(2 * exposure, generator=generator),
    }


def deviances(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    log_rate = model(batch["covariates"]).squeeze(1) + batch["exposure"].log()
    return log_rate.exp() - batch["claims"] * log_rate


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return deviances(model, batch).mean()


# "own": the workers see all policies and the dealer below gives each worker its own.
case = Case(model=build_model, batch=policies, loss=loss, layout="1x3", shards="own")


class Dealer(Sampler[tuple[int, bool]]):
    """Yields the policy's index, and whether it counts."""

    def __init__(self, count: int, workers: int, worker: int) -> None:
        self.count, self.workers, self.worker = count, workers, worker
        self.rounds = math.ceil(count / workers)

    def __iter__(self) -> Iterator[tuple[int, bool]]:
        for position in range(self.worker, self.rounds * self.workers, self.workers):
            yield position % self.count, position <= self.count

    def __len__(self) -> int:
        return self.rounds


class Flagged(Dataset):
    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __getitem__(self, key: tuple[int, bool]) -> dict[str, Tensor]:
        index, counts = key
        return {name: value[index] for name, value in self.batch.items()} | {"counts": counts}

    def __len__(self) -> int:
        return len(self.batch["claims"])


def step(model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
    data = Flagged(batch)
    dealer = Dealer(len(data), rank.world_size, rank.rank)
    ddp = DistributedDataParallel(model)
    for mine in DataLoader(data, batch_size=len(dealer), sampler=dealer):
        total = mine["counts"].sum()
        dist.all_reduce(total)
        counted = (deviances(ddp, mine) * mine["counts"]).sum()
        (counted * rank.world_size / total).backward()
