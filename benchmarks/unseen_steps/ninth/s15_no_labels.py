"""Self-distillation without labels: a student follows the centred outputs of its moving average."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PROTOTYPES = 8
LR, EMA, CENTRE_EMA = 0.3, 0.9, 0.6


def backbone():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, PROTOTYPES),
    )


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = backbone()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(PROTOTYPES))


def two_views(generator):
    image = torch.randn(32, 1, 6, 6, generator=generator)
    noise = torch.randn(2, 32, 1, 6, 6, generator=generator)
    return {"one": image + 0.3 * noise[0], "two": image.flip(-1) + 0.3 * noise[1]}


class Distiller:
    """One process. What needs the whole batch is in methods that a subclass may replace."""

    def __init__(self, pair):
        self.pair = pair
        self.student = self.wrap(pair.student)
        self.optimizer = torch.optim.SGD(pair.student.parameters(), lr=LR)

    def wrap(self, student):
        return student

    def batch_centre(self, outputs):
        return outputs.mean(0)

    def __call__(self, batch):
        views = torch.cat([batch["one"], batch["two"]])
        with torch.no_grad():
            teacher = self.pair.teacher(views)
            targets = ((teacher - self.pair.centre) / 0.1).softmax(-1)
        student = F.log_softmax(self.student(views) / 0.2, -1)
        # The teacher's first view teaches the student's second one, and the other way round.
        loss = -(targets.roll(len(batch["one"]), 0) * student).sum(-1).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.follow(teacher)

    @torch.no_grad()
    def follow(self, outputs):
        for slow, fast in zip(self.pair.teacher.parameters(), self.pair.student.parameters()):
            slow.lerp_(fast, 1 - EMA)
        self.pair.centre.lerp_(self.batch_centre(outputs), 1 - CENTRE_EMA)


class DistributedDistiller(Distiller):
    def __init__(self, model, rank):
        self.rank = rank
        super().__init__(model)

    def wrap(self, student):
        return DDP(student)

    def batch_centre(self, outputs):
        total = outputs.sum(0)
        dist.all_reduce(total)
        return total / len(outputs)


step = DistributedDistiller
case = Case(model=Pair, batch=two_views)
options = {"compare": "update", "reference": Distiller, "steps": 4}
