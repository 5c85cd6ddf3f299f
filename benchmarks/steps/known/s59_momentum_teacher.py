"""Self-distillation: the student follows a teacher, which is a moving average of the student."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

MOMENTUM = 0.9


def tower():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


class StudentAndTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = tower()
        self.teacher = tower().requires_grad_(requires_grad=False)

    def forward(self, batch):
        with torch.no_grad():
            target = self.teacher(batch["weak_view"])
        return self.student(batch["strong_view"]), target


def loss(model, batch):
    prediction, target = model(batch)
    target = (target / 0.2).softmax(dim=1)
    return -(target * prediction.log_softmax(dim=1)).sum(dim=1).mean()


def make_batch(generator):
    x = torch.randn(12, 6, generator=generator)
    return {
        "weak_view": x + 0.1 * torch.randn(12, 6, generator=generator),
        "strong_view": x + 0.5 * torch.randn(12, 6, generator=generator),
    }


case = Case(model=StudentAndTeacher, batch=make_batch, loss=loss, layout="2x1")


class SelfDistillation:
    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def move_teacher(self):
        pairs = zip(self.model.teacher.parameters(), self.model.student.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, 1 - MOMENTUM)

    def teach(self, shard):
        self.model.zero_grad()
        loss(self.model, shard).backward()
        for p in self.model.student.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def step(model, shard, rank):
    training = SelfDistillation(model)
    training.move_teacher()
    training.teach(shard)
