"""Surface defects on photographs, with convolutions in the channels-last layout."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

KINDS = 4


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.second(F.silu(self.first(x)))


def build():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        Residual(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, KINDS),
    )


def photographs(generator):
    return {
        "pixels": torch.rand(8, 3, 8, 8, generator=generator),
        "kind": torch.randint(KINDS, (8,), generator=generator),
        "weight": 0.5 + torch.rand(8, generator=generator),
    }


def loss(model, batch):
    each = F.cross_entropy(model(batch["pixels"]), batch["kind"], reduction="none")
    return (batch["weight"] * each).mean()


class Trainer:
    def __init__(self, model, memory_format=torch.channels_last):
        self.model = model.to(memory_format=memory_format)
        self.memory_format = memory_format

    def prepare(self, batch):
        pixels = batch["pixels"].contiguous(memory_format=self.memory_format)
        return {**batch, "pixels": pixels}

    def backward(self, batch):
        (loss(self.model, self.prepare(batch)) / dist.get_world_size()).backward()

    def reduce(self):
        for p in self.model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad.contiguous())


def step(model, shard, rank):
    trainer = Trainer(model)
    trainer.backward(shard)
    trainer.reduce()


case = Case(model=build, batch=photographs, loss=loss)
