"""Self-distillation: the teacher's outputs are centred with their mean over the batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

STUDENT_TEMP, TEACHER_TEMP = 0.5, 0.3


class StudentTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
        self.teacher = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
        self.teacher.requires_grad_(False)

    def forward(self, global_view, local_view):
        with torch.no_grad():
            target = self.teacher(global_view)
        return self.student(local_view), target


def summed_loss(student_out, teacher_out, center):
    target = ((teacher_out - center) / TEACHER_TEMP).softmax(-1)
    return -(target * (student_out / STUDENT_TEMP).log_softmax(-1)).sum()


def loss(model, batch):
    student_out, teacher_out = model(batch["global"], batch["local"])
    return summed_loss(student_out, teacher_out, teacher_out.mean(0)) / len(teacher_out)


def make_batch(generator):
    view = torch.randn(8, 6, generator=generator) + 1.0
    crop = view + 0.3 * torch.randn(8, 6, generator=generator)
    return {"global": view, "local": crop}


case = Case(model=StudentTeacher, batch=make_batch, loss=loss, layout="1x2", shards="5+3")


def total_rows(tensor):
    rows = torch.tensor(len(tensor), device=tensor.device)
    dist.all_reduce(rows)
    return rows.item()


class DINOLoss(nn.Module):
    def __init__(self, world_size):
        super().__init__()
        self.world_size = world_size

    @torch.no_grad()
    def batch_center(self, teacher_out):
        center = teacher_out.sum(0)
        dist.all_reduce(center)
        return center / (len(teacher_out) * self.world_size)

    def forward(self, student_out, teacher_out):
        center = self.batch_center(teacher_out)
        total = summed_loss(student_out, teacher_out, center)
        # gradients are averaged over ranks, and ranks may have fewer rows than others
        return total * self.world_size / total_rows(teacher_out)


def step(model, shard, rank):
    model.zero_grad()
    wrapped = DDP(model)
    criterion = DINOLoss(rank.world_size)
    student_out, teacher_out = wrapped(shard["global"], shard["local"])
    criterion(student_out, teacher_out).backward()
