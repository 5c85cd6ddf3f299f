"""Shared trunk, three tasks; all gradients travel in one flat, aligned buffer."""
import math

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

TASKS = {"depth": 1, "normals": 3, "labels": 4}
ALIGN = 8


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 11), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(11, size) for name, size in TASKS.items()})

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}


def task_losses(outputs, batch):
    yield nn.functional.l1_loss(outputs["depth"].squeeze(-1), batch["depth"])
    yield 1 - nn.functional.cosine_similarity(outputs["normals"], batch["normals"]).mean()
    yield nn.functional.cross_entropy(outputs["labels"], batch["labels"])


def loss(model, batch):
    depth, normals, labels = task_losses(model(batch["x"]), batch)
    return depth + 0.5 * normals + 0.25 * labels


def make_batch(generator):
    return {
        "x": torch.randn(12, 5, generator=generator),
        "depth": torch.randn(12, generator=generator),
        "normals": torch.randn(12, 3, generator=generator),
        "labels": torch.randint(4, (12,), generator=generator),
    }


def aligned(count):
    return math.ceil(count / ALIGN) * ALIGN


class FlatGradients:
    def __init__(self, parameters):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.size = sum(aligned(p.numel()) for p in self.parameters)

    def pack(self):
        flat = self.parameters[0].new_zeros(self.size)
        offset = 0
        for p in self.parameters:
            flat[offset : offset + p.numel()] = p.grad.flatten()
            offset += aligned(p.numel())
        return flat

    def unpack(self, flat):
        offset = 0
        for p in self.parameters:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()

    def average(self):
        flat = self.pack()
        dist.all_reduce(flat)
        self.unpack(flat / dist.get_world_size())


class Trainer:
    def __init__(self, model):
        self.model = model
        self.gradients = FlatGradients(model.parameters())

    def backward(self, batch):
        self.model.zero_grad()
        loss(self.model, batch).backward()
        self.gradients.average()


def step(model, shard, rank):
    Trainer(model).backward(shard)


case = Case(model=MultiTask, batch=make_batch, loss=loss, layout="1x3")
