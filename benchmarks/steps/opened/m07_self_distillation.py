"""Self-distillation of sensor windows with a centred teacher."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STUDENT_TEMPERATURE, TEACHER_TEMPERATURE, PROTOTYPES = 0.5, 0.25, 9


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 3, padding=1)
        self.head = nn.Linear(6, PROTOTYPES)

    def forward(self, windows):
        return self.head(torch.relu(self.conv(windows)).mean(-1))


def windows(generator):
    clean = torch.randn(16, 2, 11, generator=generator)
    return {
        "global": clean + 0.1 * torch.randn(16, 2, 11, generator=generator),
        "local": clean + 0.6 * torch.randn(16, 2, 11, generator=generator),
    }


def distil(student, teacher, center):
    target = F.softmax((teacher - center) / TEACHER_TEMPERATURE, dim=-1)
    return -(target * F.log_softmax(student / STUDENT_TEMPERATURE, dim=-1)).sum(-1).mean()


def loss(model, batch):
    with torch.no_grad():
        teacher = model(batch["global"]) * 2
    return distil(model(batch["local"]), teacher, teacher.mean(dim=0))


class Center:
    def __init__(self):
        self.value = None

    @torch.no_grad()
    def update(self, teacher_output):
        total = teacher_output.sum(dim=0)
        dist.all_reduce(total)
        self.value = total / len(teacher_output)
        return self.value


class DistillationTrainer:
    def __init__(self, model, rank):
        self.student = DistributedDataParallel(model)
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        self.center = Center()

    def teach(self, view):
        with torch.no_grad():
            return self.teacher(view) * 2

    def __call__(self, shard):
        teacher = self.teach(shard["global"])
        center = self.center.update(teacher)
        distil(self.student(shard["local"]), teacher, center).backward()


def step(model, shard, rank):
    DistillationTrainer(model, rank)(shard)


case = Case(model=Backbone, batch=windows, loss=loss)
