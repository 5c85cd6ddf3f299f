"""A student learns from the stored logits of a teacher, a few rows at a time.

Each rank accumulates the gradients of its micro-batches, and exchanges them with the last one.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

TEMPERATURE = 2.0
HARD = 0.3

Batch = dict[str, Tensor]


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 10)
        self.output = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.hardswish(self.hidden(x)))


def distillation_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    soft = F.log_softmax(logits / TEMPERATURE, dim=-1)
    target = F.log_softmax(teacher / TEMPERATURE, dim=-1)
    return F.kl_div(soft, target, reduction="batchmean", log_target=True) * TEMPERATURE**2


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["x"])
    hard = F.cross_entropy(logits, batch["labels"])
    return HARD * hard + (1 - HARD) * distillation_loss(logits, batch["teacher"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(20, 8, generator=generator),
        "labels": torch.randint(6, (20,), generator=generator),
        "teacher": 2 * torch.randn(20, 6, generator=generator),
    }


case = Case(model=Student, batch=make_batch, loss=loss, layout="1x2")


class Accumulator:
    def __init__(self, ddp: DistributedDataParallel, rows: int) -> None:
        self.ddp = ddp
        self.rows = rows

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        columns = [column.split(self.rows) for column in batch.values()]
        for parts in zip(*columns, strict=True):
            yield dict(zip(batch, parts, strict=True))

    def backward(self, batch: Batch) -> float:
        parts = list(self.micro_batches(batch))
        logged = 0.0
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            with nullcontext() if last else self.ddp.no_sync():
                value = loss(self.ddp, part) / len(parts)
                value.backward()
            logged += value.item()
        return logged


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.zero_grad()
    Accumulator(ddp, rows=4).backward(shard)
