"""Self-distillation: a student follows a centred teacher, and the centre is that of the batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CELLS, GENES, PROTOTYPES = 12, 16, 8
STUDENT_T, TEACHER_T = 0.3, 0.1


def projector():
    return nn.Sequential(nn.Linear(GENES, 14), nn.GELU(), nn.Linear(14, PROTOTYPES))


class Distillation(nn.Module):
    """Student and teacher; the teacher gets no gradients."""

    def __init__(self):
        super().__init__()
        self.student = projector()
        self.teacher = projector()
        for parameter in self.teacher.parameters():
            parameter.requires_grad_(False)

    def forward(self, first, second):
        with torch.no_grad():
            target = self.teacher(second)
        return self.student(first), target


class Centre:
    """What is subtracted from the teacher's logits, so that no prototype wins everywhere."""

    def __init__(self, momentum=0.0):
        self.momentum = momentum
        self.value = None

    def total(self, rows):
        return rows.sum(dim=0, keepdim=True)

    @torch.no_grad()
    def update(self, logits):
        fresh = self.total(logits) / len(logits)
        if self.value is None:
            self.value = fresh
        else:
            self.value = self.momentum * self.value + (1 - self.momentum) * fresh
        return self.value


class CentreOfAllRanks(Centre):
    def total(self, rows):
        total = super().total(rows)
        dist.all_reduce(total)
        return total


def objective(model, batch, centre):
    student, teacher = model(batch["first"], batch["second"])
    sharp = ((teacher - centre.update(teacher)) / TEACHER_T).softmax(-1)
    return -(sharp * (student / STUDENT_T).log_softmax(-1)).sum(-1).mean()


def make_batch(generator):
    cells = torch.randn(CELLS, GENES, generator=generator) + 1
    noise = torch.randn(2, CELLS, GENES, generator=generator) * 0.3
    return {"first": cells + noise[0], "second": cells + noise[1]}


def loss(model, batch):
    return objective(model, batch, Centre())


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    objective(ddp, shard, CentreOfAllRanks()).backward()


case = Case(model=Distillation, batch=make_batch, loss=loss)
