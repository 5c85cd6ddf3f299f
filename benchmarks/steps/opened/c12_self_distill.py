"""Self-distillation without labels: teacher outputs are centred and sharpened, the student follows.

The centre is that of the present batch over all ranks (no moving average yet).
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STUDENT_TEMP, TEACHER_TEMP = 0.5, 0.2


def projector():
    return nn.Sequential(nn.Linear(9, 14), nn.GELU(), nn.Linear(14, 7))


class StudentTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = projector()
        self.teacher = copy.deepcopy(self.student)
        self.teacher.requires_grad_(False)

    def forward(self, crops, to_student=True):
        return (self.student if to_student else self.teacher)(crops)


def two_crops(generator):
    image = torch.randn(16, 9, generator=generator)
    noise = torch.randn(2, 16, 9, generator=generator)
    return {"a": image + 0.3 * noise[0], "b": image + 0.3 * noise[1]}


class DistillLoss:
    def __init__(self, distributed=False):
        self.distributed = distributed

    @torch.no_grad()
    def batch_center(self, teacher_output):
        center = teacher_output.sum(dim=0, keepdim=True)
        if self.distributed:
            dist.all_reduce(center)
        return center / len(teacher_output)

    def targets(self, teacher_output):
        center = self.batch_center(teacher_output)
        return ((teacher_output - center) / TEACHER_TEMP).softmax(dim=-1)

    def __call__(self, student_output, teacher_output):
        log_student = (student_output / STUDENT_TEMP).log_softmax(dim=-1)
        return -(self.targets(teacher_output) * log_student).sum(dim=-1).mean()


def loss(model, batch):
    with torch.no_grad():
        teacher_output = model(batch["b"], to_student=False)
    return DistillLoss()(model(batch["a"]), teacher_output)


case = Case(model=StudentTeacher, batch=two_crops, loss=loss, layout="2x2")


def step(model, shard, rank):
    student = DistributedDataParallel(model.student)
    criterion = DistillLoss(distributed=rank.world_size > 1)
    with torch.no_grad():
        teacher_output = model.teacher(shard["b"])
    criterion(student(shard["a"]), teacher_output).backward()
