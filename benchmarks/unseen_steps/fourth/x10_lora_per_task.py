"""LoRA adapters for several tasks on a frozen base; batches hold one task per rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, WIDTH, CLASSES = 6, 10, 4
TASKS = 3
PER_TASK = 4


class LoraLinear(nn.Module):
    """A frozen linear layer with a low-rank update for every task."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.scaling = alpha / rank
        self.down = nn.ParameterList(
            torch.randn(rank, inputs) / math.sqrt(inputs) for _ in range(TASKS)
        )
        self.up = nn.ParameterList(0.1 * torch.randn(outputs, rank) for _ in range(TASKS))

    def forward(self, hidden: Tensor, task: int) -> Tensor:
        update = F.linear(F.linear(hidden, self.down[task]), self.up[task])
        return self.base(hidden) + self.scaling * update


class MultiTaskModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = LoraLinear(FEATURES, WIDTH)
        self.second = LoraLinear(WIDTH, CLASSES)

    def forward(self, features: Tensor, task: int) -> Tensor:
        return self.second(torch.tanh(self.first(features, task)), task)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all examples, whichever their tasks are."""
    losses = []
    for task in batch["task"].unique().tolist():
        chosen = batch["task"] == task
        logits = model(batch["features"][chosen], task)
        losses.append(F.cross_entropy(logits, batch["label"][chosen], reduction="none"))
    return torch.cat(losses).mean()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    count = TASKS * PER_TASK
    return {
        "features": torch.randn(count, FEATURES, generator=generator),
        "label": torch.randint(CLASSES, (count,), generator=generator),
        "task": torch.arange(TASKS).repeat_interleave(PER_TASK),
    }


class BucketedReducer:
    """Averages gradients in buckets of a limited size."""

    def __init__(self, model: nn.Module, world_size: int, bucket_numel: int = 96) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.world_size = world_size
        self.bucket_numel = bucket_numel

    def buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        filled = 0
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            if bucket and filled + parameter.numel() > self.bucket_numel:
                yield bucket
                bucket, filled = [], 0
            bucket.append(parameter.grad)
            filled += parameter.numel()
        if bucket:
            yield bucket

    def reduce(self) -> None:
        for bucket in self.buckets():
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            flat /= self.world_size
            dist.all_reduce(flat)
            offset = 0
            for gradient in bucket:
                gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
                offset += gradient.numel()


case = Case(model=MultiTaskModel, batch=make_batch, loss=loss, layout="1x3")


def step(model: MultiTaskModel, shard: dict[str, Tensor], rank) -> None:
    loss(model, shard).backward()
    BucketedReducer(model, rank.world_size).reduce()
