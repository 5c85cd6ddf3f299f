"""Self-distillation of ECG encoders: the student follows a teacher that is its moving average.

The teacher moves once at the start of every step. Only rank 0 writes checkpoints of it.
"""

import copy

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

MOMENTUM = 0.7


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        for p in self.teacher.parameters():  # some steps behind
            p.add_(0.3 * torch.randn_like(p))

    def forward(self, view):
        return self.student(view)


def agreement(student, teacher):
    return -(teacher.detach() / 0.5).softmax(-1).mul((student / 0.9).log_softmax(-1)).sum(-1)


def moved(model):
    """The teacher's weights of this step."""
    students = dict(model.student.named_parameters())
    return {
        name: p.detach() * MOMENTUM + students[name].detach() * (1 - MOMENTUM)
        for name, p in model.teacher.named_parameters()
    }


def loss(model, batch):
    weights = moved(model)
    target = functional_call(model.teacher, weights, (batch["clean"],))
    return agreement(model(batch["noisy"]), target).mean()


def heartbeats(generator):
    clean = torch.randn(12, 12, generator=generator).cumsum(1)
    return {"clean": clean, "noisy": clean + 0.4 * torch.randn(12, 12, generator=generator)}


case = Case(model=Distilled, batch=heartbeats, loss=loss, layout="1x3")


class MovingAverage:
    def __init__(self, model, is_main):
        self.model, self.is_main = model, is_main
        self.checkpoints = []

    @torch.no_grad()
    def update(self):
        if self.is_main:
            weights = moved(self.model)
            for name, p in self.model.teacher.named_parameters():
                p.copy_(weights[name])
            self.checkpoints.append(weights)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    MovingAverage(model, is_main=rank.rank == 0).update()
    with torch.no_grad():
        target = model.teacher(shard["clean"])
    agreement(ddp(shard["noisy"]), target).mean().backward()
