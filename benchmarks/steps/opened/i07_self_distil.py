"""Self-distillation without labels: a frozen teacher, whose outputs are centred over the batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PROTOTYPES = 12
TEACHER_TEMPERATURE, STUDENT_TEMPERATURE = 0.3, 0.5


def backbone():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(6 * 9, PROTOTYPES),
    )


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = backbone()
        self.teacher = backbone().requires_grad_(False)

    def forward(self, seen_by_teacher, seen_by_student):
        with torch.no_grad():
            target = self.teacher(seen_by_teacher)
        return target, self.student(seen_by_student)


def crops(generator):
    images = torch.randn(8, 1, 6, 6, generator=generator)
    jitter = 0.3 * torch.randn(8, 1, 6, 6, generator=generator)
    return {"teacher": images + 1, "student": images + jitter}


def agreement(target, output, center):
    wanted = ((target - center) / TEACHER_TEMPERATURE).softmax(-1)
    return -(wanted * (output / STUDENT_TEMPERATURE).log_softmax(-1)).sum(-1).mean()


def loss(model, batch):
    target, output = model(batch["teacher"], batch["student"])
    return agreement(target, output, target.mean(0))


class Center:
    """The mean teacher output over all ranks; ``momentum`` 0 takes that of this batch alone."""

    def __init__(self, momentum=0.0):
        self.momentum = momentum
        self.value = None

    @torch.no_grad()
    def update(self, target):
        total = target.sum(0)
        dist.all_reduce(total)
        mean = total / len(target)
        if self.value is None:
            self.value = mean
        else:
            self.value = self.momentum * self.value + (1 - self.momentum) * mean
        return self.value


class SelfDistillation:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)
        self.center = Center()

    def training_step(self, batch):
        target, output = self.ddp(batch["teacher"], batch["student"])
        return agreement(target, output, self.center.update(target))


def step(model, shard, rank):
    learner = SelfDistillation(model)
    learner.training_step(shard).backward()


case = Case(model=Pair, batch=crops, loss=loss, layout="1x2")
