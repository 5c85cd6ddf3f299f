"""Semi-supervised classification with a mean teacher: labels plus consistency with an EMA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class MeanTeacherConfig:
    momentum: float = 0.6
    consistency: float = 2.0


CONFIG = MeanTeacherConfig()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 4))


class MeanTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = network()
        self.teacher = network().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


class WeightAverage:
    """An exponential moving average that starts at the weights of the teacher."""

    def __init__(self, teacher: nn.Module, momentum: float) -> None:
        self.teacher, self.momentum = teacher, momentum
        self.shadow = {name: value.detach().clone() for name, value in teacher.named_parameters()}

    @torch.no_grad()
    def update(self, student: nn.Module) -> None:
        for name, value in student.named_parameters():
            self.shadow[name].lerp_(value, 1 - self.momentum)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        return functional_call(self.teacher, self.shadow, (x,)).softmax(dim=-1)


def views(generator: torch.Generator) -> Batch:
    x = torch.randn(16, 6, generator=generator)
    return {
        "weak": x + 0.1 * torch.randn(16, 6, generator=generator),
        "strong": x + 0.5 * torch.randn(16, 6, generator=generator),
        "labels": torch.randint(4, (16,), generator=generator),
    }


def objective(forward: nn.Module, average: WeightAverage, batch: Batch) -> Tensor:
    logits = forward(batch["strong"])
    supervised = F.cross_entropy(logits, batch["labels"])
    consistency = (logits.softmax(dim=-1) - average.predict(batch["weak"])).square().mean()
    return supervised + CONFIG.consistency * consistency


def loss(model: MeanTeacher, batch: Batch) -> Tensor:
    average = WeightAverage(model.teacher, CONFIG.momentum)
    average.update(model.student)
    return objective(model, average, batch)


def is_main_process() -> bool:
    return dist.get_rank() == 0


class SemiSupervisedTrainer:
    def __init__(self, model: MeanTeacher) -> None:
        self.ddp = DistributedDataParallel(model)
        self.average = WeightAverage(model.teacher, CONFIG.momentum)

    def update_teacher(self) -> None:
        if is_main_process():
            self.average.update(self.ddp.module.student)

    def train_step(self, batch: Batch) -> None:
        self.update_teacher()
        objective(self.ddp, self.average, batch).backward()


case = Case(model=MeanTeacher, batch=views, loss=loss, layout="2x2")


def step(model: MeanTeacher, shard: Batch, rank: Rank) -> None:
    SemiSupervisedTrainer(model).train_step(shard)
