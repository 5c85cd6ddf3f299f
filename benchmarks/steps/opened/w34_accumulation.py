"""Gradient accumulation over micro-batches, with one synchronisation for each batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CHANNELS, SIZE, CLASSES, EXAMPLES = 2, 6, 4, 20


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of a rank are cut into micro-batches that fit into memory."""

    rows: int
    micro_batch: int = 4

    @property
    def micro_batches(self) -> int:
        return self.rows // self.micro_batch

    def is_last(self, index: int) -> bool:
        return index == self.micro_batches - 1


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, 4, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * SIZE * SIZE, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.conv(images))).flatten(1))


def loss(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction=reduction)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(EXAMPLES, CHANNELS, SIZE, SIZE, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


class AccumulatingTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)

    def split(self, batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
        pieces = {key: value.split(size) for key, value in batch.items()}
        return [dict(zip(pieces, values)) for values in zip(*pieces.values())]

    def fit(self, batch: dict[str, Tensor]) -> float:
        plan = BatchPlan(rows=len(batch["labels"]))
        total = 0.0
        self.ddp.zero_grad()
        for index, micro_batch in enumerate(self.split(batch, plan.micro_batch)):
            context = nullcontext() if plan.is_last(index) else self.ddp.no_sync()
            with context:
                value = loss(self.ddp, micro_batch, reduction="sum") / plan.rows
                value.backward()
            total += value.item()
        return total


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    AccumulatingTrainer(model).fit(shard)
