"""A small residual network in channels_last, with its gradients averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

EXAMPLES, CLASSES, SIZE = 12, 4, 6


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.norm1(self.conv1(x))))


class ResidualNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, kernel_size=3, stride=2, padding=1)
        self.block = ResidualBlock(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.block(self.stem(x))
        return self.head(x.mean(dim=(2, 3)))


def loss(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def make_batch(generator):
    return {
        "images": torch.randn(EXAMPLES, 3, SIZE, SIZE, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


case = Case(model=ResidualNet, batch=make_batch, loss=loss, layout="1x2")


def average_gradients(module, world_size):
    """Launch everything, then wait: the backend may overlap the transfers."""
    works = []
    for parameter in module.parameters():
        if parameter.grad is None:
            continue
        parameter.grad.div_(world_size)
        # the collectives want dense memory
        works.append(dist.all_reduce(parameter.grad.contiguous(), async_op=True))
    for work in works:
        work.wait()


class Engine:
    def __init__(self, model, world_size, channels_last=True):
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = model.to(memory_format=self.memory_format)
        self.world_size = world_size

    def prepare(self, batch):
        images = batch["images"].to(memory_format=self.memory_format)
        return {**batch, "images": images}

    def backward(self, batch):
        loss(self.model, self.prepare(batch)).backward()
        average_gradients(self.model, self.world_size)


def step(model, shard, rank):
    Engine(model, rank.world_size).backward(shard)
