"""Distillation: a student learns from a teacher's soft labels and from the hard ones."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

CLASSES, TEMPERATURE = 5, 3.0

Batch = dict[str, Tensor]


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 10), nn.ReLU())
        self.classify = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["x"])
    soft = F.kl_div(
        F.log_softmax(scores / TEMPERATURE, dim=-1),
        F.softmax(batch["teacher"] / TEMPERATURE, dim=-1),
        reduction="batchmean",
    )
    return TEMPERATURE**2 * soft + 0.5 * F.cross_entropy(scores, batch["label"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(16, 8, generator=generator),
        "teacher": 2 * torch.randn(16, CLASSES, generator=generator),
        "label": torch.randint(0, CLASSES, (16,), generator=generator),
    }


case = Case(model=Student, batch=make_batch, loss=loss, layout="1x2")


@dataclass
class Distillation:
    temperature: float = TEMPERATURE
    hard_weight: float = 0.5

    def soften(self, scores: Tensor) -> Tensor:
        return scores.div_(self.temperature).log_softmax(dim=-1)

    def soft_loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        targets = self.soften(teacher.clone())
        divergence = F.kl_div(self.soften(student), targets, reduction="batchmean", log_target=True)
        return divergence * self.temperature**2

    def __call__(self, student: Tensor, shard: Batch) -> Tensor:
        value = self.soft_loss(student, shard["teacher"])
        return value + self.hard_weight * F.cross_entropy(student, shard["label"])


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    criterion = Distillation()
    model.zero_grad()
    criterion(model(shard["x"]), shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(rank.world_size)
