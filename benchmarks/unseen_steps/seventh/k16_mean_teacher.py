"""Semi-supervised training: the student agrees with a teacher, the moving average of itself."""
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

DECAY, LR, CONSISTENCY = 0.6, 0.2, 2.0


def build():
    return nn.Sequential(nn.Linear(6, 12), nn.Mish(), nn.Linear(12, 4))


def make_batch(generator):
    n = 48
    return {
        "weak": torch.randn(n, 6, generator=generator),
        "noise": 0.2 * torch.randn(n, 6, generator=generator),
        "labels": torch.randint(0, 4, (n,), generator=generator),
    }


def objective(student, teacher, batch):
    supervised = F.cross_entropy(student(batch["weak"]), batch["labels"])
    with torch.no_grad():
        wanted = teacher(batch["weak"]).softmax(-1)
    got = student(batch["weak"] + batch["noise"]).softmax(-1)
    return supervised + CONSISTENCY * F.mse_loss(got, wanted)


class Average:
    def __init__(self, model):
        self.model = copy.deepcopy(model).requires_grad_(False)

    def __call__(self, rows):
        return self.model(rows)

    @torch.no_grad()
    def update(self, model):
        for mine, new in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(new, 1 - DECAY)


def reference(model):
    teacher, optimizer = Average(model), torch.optim.SGD(model.parameters(), lr=LR)

    def train(batch):
        optimizer.zero_grad()
        objective(model, teacher, batch).backward()
        optimizer.step()
        teacher.update(model)

    return train


class EmaCallback:
    def __init__(self, average, is_main):
        self.average, self.is_main = average, is_main

    def on_step_end(self, model):
        if self.is_main:
            self.average.update(model)


class Fit:
    def __init__(self, model, rank):
        self.student = DDP(model)
        self.teacher = Average(model)
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=LR)
        self.callbacks = [EmaCallback(self.teacher, rank == 0)]

    def __call__(self, shard):
        self.optimizer.zero_grad()
        objective(self.student, self.teacher, shard).backward()
        self.optimizer.step()
        for callback in self.callbacks:
            callback.on_step_end(self.student.module)


step = Fit
case = Case(model=build, batch=make_batch)
options = {"compare": "update", "reference": reference, "steps": 3}
