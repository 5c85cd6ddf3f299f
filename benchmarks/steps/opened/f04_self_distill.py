"""Self-distillation without labels: student and centred, sharpened teacher over two crops."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass
class DistillConfig:
    in_dim: int = 9
    hidden: int = 14
    prototypes: int = 6
    student_temp: float = 0.4
    teacher_temp: float = 0.2
    center_momentum: float = 0.5


CFG = DistillConfig()


def make_network(cfg=CFG):
    return nn.Sequential(
        nn.Linear(cfg.in_dim, cfg.hidden),
        nn.GELU(),
        nn.Linear(cfg.hidden, cfg.prototypes),
    )


class StudentTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = make_network()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, crops):
        student_out = self.student(crops)
        with torch.no_grad():
            teacher_out = self.teacher(crops)
        return student_out, teacher_out


class CentredCrossEntropy:
    def __init__(self, cfg=CFG):
        self.cfg = cfg
        self.center = torch.zeros(1, cfg.prototypes, dtype=torch.float64)

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = teacher_output.sum(dim=0, keepdim=True)
        if dist.is_initialized():
            dist.all_reduce(batch_center)
        batch_center = batch_center / len(teacher_output)
        keep = self.cfg.center_momentum
        self.center = self.center * keep + batch_center * (1 - keep)

    def targets(self, teacher_output):
        return F.softmax((teacher_output - self.center) / self.cfg.teacher_temp, dim=-1).detach()

    def __call__(self, student_views, teacher_views):
        self.update_center(torch.cat(teacher_views))
        total, terms = 0.0, 0
        for t_index, teacher_view in enumerate(teacher_views):
            target = self.targets(teacher_view)
            for s_index, student_view in enumerate(student_views):
                if s_index == t_index:
                    continue
                log_prob = F.log_softmax(student_view / self.cfg.student_temp, dim=-1)
                total = total - (target * log_prob).sum(dim=-1).mean()
                terms += 1
        return total / terms


def distillation_loss(model, batch):
    criterion = CentredCrossEntropy()
    crops = torch.cat([batch["crop_a"], batch["crop_b"]])
    student_out, teacher_out = model(crops)
    return criterion(student_out.chunk(2), teacher_out.chunk(2))


def make_batch(generator):
    base = torch.randn(16, CFG.in_dim, generator=generator) + 0.5
    noise = 0.4 * torch.randn(2, 16, CFG.in_dim, generator=generator)
    return {"crop_a": base + noise[0], "crop_b": base + noise[1]}


class DistillationTrainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)

    def train_one_batch(self, batch):
        loss = distillation_loss(self.ddp, batch)
        loss.backward()
        return loss.item()


case = Case(model=StudentTeacher, batch=make_batch, loss=distillation_loss, layout="2x2")


def step(model, shard, rank):
    DistillationTrainer(model).train_one_batch(shard)
