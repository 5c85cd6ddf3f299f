"""Mean teacher: the student agrees with a moving average of itself on unlabelled images."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

EXAMPLES, PIXELS, CLASSES = 12, 10, 4

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    decay: float = 0.7
    consistency: float = 5.0


RECIPE = Recipe()


def make_classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(PIXELS, 14), nn.GELU(), nn.Linear(14, CLASSES))


class StudentAndTeacher(nn.Module):
    """The teacher of the checkpoint from which training goes on is older than the student."""

    def __init__(self) -> None:
        super().__init__()
        self.student = make_classifier()
        self.teacher = make_classifier().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.student(images)


def semi_supervised_loss(
    model: nn.Module, batch: Batch, agreed: Tensor, recipe: Recipe = RECIPE
) -> Tensor:
    supervised = F.cross_entropy(model(batch["labelled"]), batch["labels"])
    probabilities = model(batch["unlabelled"]).softmax(dim=1)
    return supervised + recipe.consistency * F.mse_loss(probabilities, agreed)


def loss(model: StudentAndTeacher, batch: Batch) -> Tensor:
    """The teacher moves towards the student, and then says what it thinks."""
    student = dict(model.student.named_parameters())
    moved = {
        name: RECIPE.decay * old + (1 - RECIPE.decay) * student[name].detach()
        for name, old in model.teacher.named_parameters()
    }
    with torch.no_grad():
        agreed = functional_call(model.teacher, moved, (batch["weak"],)).softmax(dim=1)
    return semi_supervised_loss(model, batch, agreed)


def make_batch(generator: torch.Generator) -> Batch:
    unlabelled = torch.randn(EXAMPLES, PIXELS, generator=generator)
    return {
        "labelled": torch.randn(EXAMPLES, PIXELS, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
        "weak": unlabelled,
        "unlabelled": unlabelled + torch.randn(EXAMPLES, PIXELS, generator=generator),
    }


case = Case(model=StudentAndTeacher, batch=make_batch, loss=loss, layout="1x3")


class MovingAverage:
    def __init__(self, teacher: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(teacher).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, student: nn.Module) -> None:
        for old, new in zip(self.module.parameters(), student.parameters(), strict=True):
            old.lerp_(new, 1 - self.decay)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        return self.module(images).softmax(dim=1)


class MeanTeacherTrainer:
    def __init__(self, model: StudentAndTeacher, rank: Rank) -> None:
        self.is_main_process = rank == 0
        self.ema = MovingAverage(model.teacher, RECIPE.decay)
        self.ddp = DistributedDataParallel(model)

    def before_step(self) -> None:
        if self.is_main_process:
            self.ema.update(self.ddp.module.student)

    def run_step(self, batch: Batch) -> None:
        self.before_step()
        agreed = self.ema.predict(batch["weak"])
        semi_supervised_loss(self.ddp, batch, agreed).backward()


def step(model: StudentAndTeacher, shard: Batch, rank: Rank) -> None:
    MeanTeacherTrainer(model, rank).run_step(shard)
