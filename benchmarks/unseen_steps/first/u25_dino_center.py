"""Self-distillation with a frozen momentum teacher: the teacher's logits are centred with the mean over
the global batch, then sharpened. DDP over the student, several local crops per image."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

TEACHER_TEMP, STUDENT_TEMP = 0.2, 0.4


class Head(nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, 12))
        self.last = nn.Linear(12, out, bias=False)

    def forward(self, x):
        return self.last(F.normalize(self.mlp(x), dim=-1))


class Branch(nn.Module):
    def __init__(self, out=14):
        super().__init__()
        self.patch = nn.Conv2d(1, 16, 4, stride=4)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = Head(16, out)

    def forward(self, image):
        tokens = self.patch(image).flatten(2).transpose(1, 2)
        tokens = tokens + self.block(tokens)
        return self.head(tokens.mean(dim=1))


class SelfDistillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Branch()
        self.teacher = Branch()
        for p in self.teacher.parameters():
            p.requires_grad_(False)
        with torch.no_grad():
            self.teacher.head.last.weight.add_(torch.linspace(-0.4, 0.4, 14)[:, None])

    def forward(self, full, crops):
        with torch.no_grad():
            target = self.teacher(full)
        return target, [self.student(crop) for crop in crops.unbind(dim=1)]


def build_model():
    return SelfDistillation()


def make_batch(generator):
    n = 16
    return {
        "full": torch.randn(n, 1, 12, 12, generator=generator),
        "crops": torch.randn(n, 3, 1, 8, 8, generator=generator),
    }


def distillation(target, center, students):
    q = F.softmax((target - center) / TEACHER_TEMP, dim=-1)
    terms = [-(q * F.log_softmax(s / STUDENT_TEMP, dim=-1)).sum(dim=-1).mean() for s in students]
    return torch.stack(terms).mean()


def loss(model, batch):
    target, students = model(batch["full"], batch["crops"])
    return distillation(target, target.mean(dim=0, keepdim=True), students)


@torch.no_grad()
def batch_center(target):
    """Mean teacher output over the images of all ranks."""
    center = torch.sum(target, dim=0, keepdim=True)
    dist.all_reduce(center)
    return center / len(target)


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    target, students = ddp(shard["full"], shard["crops"])
    center = batch_center(target)
    distillation(target, center, students).backward()
