"""Self-distillation after DINO: a student sees two crops, an EMA teacher sees the other one.

The teacher's outputs are centred with the mean over the batch, which is that of all GPUs.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

STUDENT_TEMP, TEACHER_TEMP = 0.1, 0.04
CROPS = 2


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(12 * 4, 24),
        nn.GELU(),
        nn.Linear(24, 10),
    )


class StudentAndTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = network()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        # as if the student had moved on by now
        for p in self.teacher.parameters():
            p.mul_(0.9)


def crops(generator):
    shade = torch.linspace(-1, 1, 8).view(-1, 1, 1, 1, 1)
    return {"crops": torch.randn(8, CROPS, 3, 8, 8, generator=generator) + shade}


class DINOLoss:
    def __init__(self, average=lambda center: center):
        self.average = average

    @torch.no_grad()
    def center(self, teacher_out):
        total = teacher_out.sum(dim=0, keepdim=True)
        return self.average(total / len(teacher_out))

    def __call__(self, student_out, teacher_out):
        center = self.center(teacher_out)
        targets = ((teacher_out - center) / TEACHER_TEMP).softmax(-1).chunk(CROPS)
        predictions = (student_out / STUDENT_TEMP).log_softmax(-1).chunk(CROPS)
        total = -(targets[0] * predictions[1]).sum(-1) - (targets[1] * predictions[0]).sum(-1)
        return total.mean() / CROPS


def forward(student, teacher, images, criterion):
    views = images.transpose(0, 1).flatten(0, 1)  # all first crops, then all second ones
    with torch.no_grad():
        teacher_out = teacher(views)
    return criterion(student(views), teacher_out)


def loss(model, batch):
    return forward(model.student, model.teacher, batch["crops"], DINOLoss())


case = Case(model=StudentAndTeacher, batch=crops, loss=loss, layout="1x4")


def average_over_gpus(center):
    if dist.get_rank() == 0:
        dist.reduce(center, dst=0)
        center /= dist.get_world_size()
    else:
        dist.reduce(center.clone(), dst=0)
    return center


def step(model, shard, rank):
    student = DDP(model.student)
    criterion = DINOLoss(average_over_gpus)
    forward(student, model.teacher, shard["crops"], criterion).backward()
