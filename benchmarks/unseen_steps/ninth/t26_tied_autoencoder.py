"""Compression of sensor frames by an autoencoder whose decoder uses the encoder's matrix."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

FRAMES, SENSORS, CODE = 16, 12, 4


class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(CODE, SENSORS) / SENSORS**0.5)
        self.bias = nn.Parameter(torch.zeros(CODE))

    def forward(self, x):
        return torch.tanh(F.linear(x, self.matrix, self.bias))


class Up(nn.Module):
    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix
        self.bias = nn.Parameter(torch.zeros(SENSORS))

    def forward(self, code):
        return F.linear(code, self.matrix.T, self.bias)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = Down()
        self.up = Up(self.down.matrix)

    def forward(self, frames):
        code = self.down(frames)
        return self.up(code), code


def frames(generator):
    return {
        "frames": torch.randn(FRAMES, SENSORS, generator=generator),
        "valid": (torch.rand(FRAMES, SENSORS, generator=generator) < 0.8).double(),
    }


def summed_loss(model, batch):
    restored, code = model(batch["frames"])
    return (batch["valid"] * (restored - batch["frames"]).square()).sum()


def loss(model, batch):
    return summed_loss(model, batch) / batch["valid"].sum()


def parts_of(model):
    """Module by module, the order in which backward finishes them."""
    for module in reversed(list(model.children())):
        yield from module.parameters()


def sync_gradients(model):
    for p in parts_of(model):
        if p.grad is not None:
            dist.all_reduce(p.grad)


def step(model, shard, rank):
    valid = shard["valid"].sum()
    dist.all_reduce(valid)
    (summed_loss(model, shard) / valid).backward()
    sync_gradients(model)


case = Case(model=Tied, batch=frames, loss=loss, layout="1x2")
