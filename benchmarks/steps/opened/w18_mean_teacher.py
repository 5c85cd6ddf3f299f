"""Mean teacher: consistency with a moving average of the student, in micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class MeanTeacherConfig:
    features: int = 8
    hidden: int = 12
    classes: int = 4
    ema_decay: float = 0.8
    consistency: float = 3.0
    micro_batches: int = 2


CONFIG = MeanTeacherConfig()
EXAMPLES = 16


def mlp(config: MeanTeacherConfig) -> nn.Module:
    return nn.Sequential(
        nn.Linear(config.features, config.hidden),
        nn.Tanh(),
        nn.Linear(config.hidden, config.classes),
    )


class StudentAndTeacher(nn.Module):
    def __init__(self, config: MeanTeacherConfig = CONFIG) -> None:
        super().__init__()
        self.student = mlp(config)
        self.teacher = mlp(config).requires_grad_(False)

    @torch.no_grad()
    def averaged(self) -> dict[str, torch.Tensor]:
        """The weights of the teacher after it has followed the student once."""
        student = dict(self.student.named_parameters())
        return {
            name: weight.lerp(student[name], 1 - CONFIG.ema_decay)
            for name, weight in self.teacher.named_parameters()
        }


def objective(student_logits, teacher_logits, labels, config: MeanTeacherConfig = CONFIG):
    consistency = F.mse_loss(student_logits.softmax(1), teacher_logits.softmax(1))
    return F.cross_entropy(student_logits, labels) + config.consistency * consistency


def make_batch(generator):
    clean = torch.randn(EXAMPLES, CONFIG.features, generator=generator)
    jitter = torch.randn(2, EXAMPLES, CONFIG.features, generator=generator) * 0.2
    return {
        "weak": clean + jitter[0],
        "strong": clean + 3 * jitter[1],
        "labels": torch.randint(CONFIG.classes, (EXAMPLES,), generator=generator),
    }


def big_batch_loss(model, batch):
    with torch.no_grad():
        teacher_logits = functional_call(model.teacher, model.averaged(), (batch["weak"],))
    return objective(model.student(batch["strong"]), teacher_logits, batch["labels"])


case = Case(model=StudentAndTeacher, batch=make_batch, loss=big_batch_loss, layout="1x2")


class MeanTeacherTrainer:
    def __init__(self, model: StudentAndTeacher, config: MeanTeacherConfig) -> None:
        self.model, self.config = model, config
        self.student = DistributedDataParallel(model.student)

    def follow_student(self) -> None:
        averaged = self.model.averaged()
        with torch.no_grad():
            for name, weight in self.model.teacher.named_parameters():
                weight.copy_(averaged[name])

    def micro_batches(self, batch):
        parts = {key: value.chunk(self.config.micro_batches) for key, value in batch.items()}
        for values in zip(*parts.values(), strict=True):
            yield dict(zip(parts, values, strict=True))

    def train_step(self, batch) -> None:
        count = self.config.micro_batches
        for index, micro in enumerate(self.micro_batches(batch)):
            self.follow_student()
            with torch.no_grad():
                teacher_logits = self.model.teacher(micro["weak"])
            with nullcontext() if index == count - 1 else self.student.no_sync():
                student_logits = self.student(micro["strong"])
                loss = objective(student_logits, teacher_logits, micro["labels"])
                (loss / count).backward()


def step(model, shard, rank):
    MeanTeacherTrainer(model, CONFIG).train_step(shard)
