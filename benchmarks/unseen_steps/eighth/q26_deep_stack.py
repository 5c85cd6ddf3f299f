"""A deep and narrow network that compresses telemetry; its gradients travel in one buffer."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

CHANNELS, DEPTH = 4, 12


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x):
        return x + torch.tanh(self.mix(x)) / 3


class Compressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.Sequential(*[Residual() for _ in range(DEPTH)])

    def forward(self, x):
        return self.stack(x)


def telemetry(generator):
    n = 16
    return {
        "now": torch.randn(n, CHANNELS, generator=generator),
        "next": torch.randn(n, CHANNELS, generator=generator),
    }


def loss(model, batch):
    return (model(batch["now"]) - batch["next"]).square().sum(-1).mean()


class Buffer:
    """One flat tensor with a place for every gradient."""

    def __init__(self, model):
        self.gradients = {name: p.grad for name, p in model.named_parameters()}
        any_gradient = next(iter(self.gradients.values()))
        total = sum(g.numel() for g in self.gradients.values())
        self.flat = any_gradient.new_zeros(total)

    def places(self, names):
        """The part of the buffer for each name."""
        offset = 0
        for name in names:
            size = self.gradients[name].numel()
            yield self.gradients[name], self.flat[offset : offset + size]
            offset += size

    def pack(self):
        for gradient, place in self.places(self.gradients):
            place.copy_(gradient.flatten())

    def unpack(self):
        for gradient, place in self.places(sorted(self.gradients)):
            gradient.copy_(place.view_as(gradient))


def step(model, shard, rank):
    loss(model, shard).backward()
    buffer = Buffer(model)
    buffer.pack()
    dist.all_reduce(buffer.flat)
    buffer.flat /= rank.world_size
    buffer.unpack()


case = Case(model=Compressor, batch=telemetry, loss=loss, layout="1x2")
