"""Semi-supervised ECG classification: a student follows the moving average of itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

LEADS, SAMPLES, RHYTHMS = 3, 16, 4
STEPS, DECAY, CONSISTENCY = 3, 0.6, 2.0

Batch = dict[str, Tensor]


class RhythmNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(LEADS, 6, kernel_size=5, stride=2)
        self.head = nn.Linear(6, RHYTHMS)

    def forward(self, signal: Tensor) -> Tensor:
        return self.head(F.gelu(self.conv(signal)).mean(-1))


def recordings(generator: torch.Generator) -> Batch:
    rows = 8 * STEPS
    return {
        "weak": torch.randn(rows, LEADS, SAMPLES, generator=generator),
        "strong": torch.randn(rows, LEADS, SAMPLES, generator=generator),
        "rhythm": torch.randint(0, RHYTHMS, (rows,), generator=generator),
    }


class Teacher:
    """Keeps a slow copy of a network, and makes soft targets with it."""

    def __init__(self, student: nn.Module, keeps: bool = True) -> None:
        self.network = copy.deepcopy(student).requires_grad_(False)
        self.keeps = keeps

    @torch.no_grad()
    def follow(self, student: nn.Module) -> None:
        if not self.keeps:
            return
        for slow, fast in zip(self.network.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 1 - DECAY)

    @torch.no_grad()
    def targets(self, signal: Tensor) -> Tensor:
        return (3 * self.network(signal)).softmax(-1)


def objective(student: nn.Module, teacher: Teacher, batch: Batch) -> Tensor:
    supervised = F.cross_entropy(student(batch["weak"]), batch["rhythm"])
    difference = student(batch["strong"]).softmax(-1) - teacher.targets(batch["weak"])
    return supervised + CONSISTENCY * difference.square().sum(-1).mean()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.8)


def in_one_process(model: nn.Module):
    teacher, optimizer = Teacher(model), make_optimizer(model)

    def train(batch: Batch) -> None:
        optimizer.zero_grad()
        objective(model, teacher, batch).backward()
        optimizer.step()
        teacher.follow(model)

    return train


def step(model: nn.Module, rank):
    # One copy is enough for the checkpoints that rank 0 writes.
    teacher = Teacher(model, keeps=rank.rank == 0)
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(model)

    def train(batch: Batch) -> None:
        optimizer.zero_grad()
        objective(ddp, teacher, batch).backward()
        optimizer.step()
        teacher.follow(model)

    return train


case = Case(model=RhythmNet, batch=recordings, layout="1x2")
options = {"compare": "update", "steps": STEPS, "reference": in_one_process}
