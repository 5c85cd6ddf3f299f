"""Response distillation from a frozen teacher into a small student, hard labels mixed with soft ones.
The gradients are averaged by a hand-written reducer that packs them into flat buckets."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

TEMPERATURE, MIX, CLASSES = 2.0, 0.7, 6


def mlp(*dims):
    layers = []
    for i, (a, b) in enumerate(zip(dims[:-1], dims[1:])):
        layers.append(nn.Linear(a, b))
        if i < len(dims) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = mlp(16, 20, 20, CLASSES)
        self.teacher = mlp(16, 40, CLASSES)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            soft = self.teacher(x)
        return self.student(x), soft


def build_model():
    return Distiller()


def make_batch(generator):
    n = 16
    return {
        "x": torch.randn(n, 16, generator=generator),
        "y": torch.randint(0, CLASSES, (n,), generator=generator),
    }


def kd_loss(student, teacher, y):
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, dim=1),
        F.softmax(teacher / TEMPERATURE, dim=1),
        reduction="batchmean",
    )
    hard = F.cross_entropy(student, y)
    return MIX * TEMPERATURE ** 2 * soft + (1 - MIX) * hard


def loss(model, batch):
    student, teacher = model(batch["x"])
    return kd_loss(student, teacher, batch["y"])


class BucketReducer:
    """Averages gradients in flat buckets, last layers first."""

    def __init__(self, module, world_size, capacity=400):
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.world_size = world_size
        self.capacity = capacity

    def flush(self, bucket):
        flat = torch.cat([p.grad.reshape(-1) for p in bucket])
        dist.all_reduce(flat)
        flat /= self.world_size
        offset = 0
        for p in bucket:
            p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
            offset += p.numel()

    def reduce(self):
        bucket = []
        size = 0
        for p in reversed(self.params):
            bucket.append(p)
            size += p.numel()
            if size >= self.capacity:
                self.flush(bucket)
                bucket, size = [], 0


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    reducer = BucketReducer(model, rank.world_size)
    student, teacher = model(shard["x"])
    kd_loss(student, teacher, shard["y"]).backward()
    reducer.reduce()
