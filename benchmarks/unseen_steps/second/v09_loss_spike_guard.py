"""Language-model training that leaves out batches whose loss is far above the running average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCABULARY, SEQUENCES, LENGTH = 17, 12, 8

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class GuardConfig:
    expected: float = 2.8
    tolerance: float = 2.1
    momentum: float = 0.98


class RecurrentLM(nn.Module):
    def __init__(self, width: int = 14) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.cell(self.embed(ids))
        return self.out(hidden)


def documents(generator: torch.Generator) -> Batch:
    """Sequences with a weight of each document; the crawl comes after the curated text."""
    weights = torch.ones(SEQUENCES)
    weights[SEQUENCES // 2 :] = 2.5
    size = (SEQUENCES, LENGTH + 1)
    return {"ids": torch.randint(VOCABULARY, size, generator=generator), "weights": weights}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["ids"][:, :-1]).transpose(1, 2)
    per_token = F.cross_entropy(logits, batch["ids"][:, 1:], reduction="none")
    return (per_token.mean(dim=1) * batch["weights"]).mean()


class SpikeGuard:
    """Keeps a running average of the loss, and says which steps not to learn from."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.average = config.expected
        self.skipped = 0

    def observe(self, value: Tensor) -> bool:
        current = value.detach().clone()
        if current.item() > self.config.tolerance * self.average:
            self.skipped += 1
            return False
        momentum = self.config.momentum
        self.average = momentum * self.average + (1 - momentum) * current.item()
        return True


class Trainer:
    def __init__(self, model: nn.Module, guard: SpikeGuard) -> None:
        self.ddp = DistributedDataParallel(model)
        self.guard = guard
        self.world_size = dist.get_world_size()

    def reported(self, value: Tensor) -> float:
        shown = value.detach().clone()
        dist.all_reduce(shown)
        return shown.item() / self.world_size

    def train_step(self, batch: Batch) -> float:
        value = loss(self.ddp, batch)
        if not self.guard.observe(value):
            value = value * 0.0
        value.backward()
        return self.reported(value)


case = Case(model=RecurrentLM, batch=documents, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Trainer(model, SpikeGuard(GuardConfig())).train_step(shard)
