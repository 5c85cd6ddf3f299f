"""Coordinate network for seismic fields. Gradients are sharded as in ZeRO-2.

Parameter i belongs to rank i % W. The owner receives the reduced gradient; before the (unsharded)
debugging optimizer, owners send them back.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class Seismic(nn.Module):
    def __init__(self):
        super().__init__()
        self.velocity = nn.Sequential(nn.Linear(3, 12), nn.Tanh())
        # random Fourier features stay as they are drawn
        self.frequencies = nn.Parameter(torch.randn(12, 10), requires_grad=False)
        self.mix = nn.Linear(20, 12)
        self.wave = nn.Linear(12, 1)

    def forward(self, xyt):
        phase = self.velocity(xyt) @ self.frequencies
        features = torch.cat([phase.sin(), phase.cos()], dim=-1)
        return self.wave(torch.tanh(self.mix(features))).squeeze(-1)


def shots(g):
    xyt = torch.rand(16, 3, generator=g) * 2 - 1
    return xyt, torch.sin(3 * xyt[:, 0]) * torch.cos(2 * xyt[:, 2])


def misfit(model, batch):
    xyt, amplitude = batch
    return nn.functional.huber_loss(model(xyt), amplitude, delta=0.3)


case = Case(model=Seismic, batch=shots, loss=misfit, layout="2x2")


class ShardedGradients:
    def __init__(self, model):
        self.me, self.world = dist.get_rank(), dist.get_world_size()
        self.everything = list(model.parameters())
        self.trainable = [p for p in self.everything if p.requires_grad]

    def owner(self, index):
        return index % self.world

    def reduce(self):
        for i, p in enumerate(self.trainable):
            buffer = p.grad.clone()
            dist.reduce(buffer, dst=self.owner(i))
            if self.owner(i) == self.me:
                p.grad.copy_(buffer / self.world)

    def gather(self):
        for i, p in enumerate(self.everything):
            if p.grad is not None:
                dist.broadcast(p.grad, src=self.owner(i))


def step(model, shard, rank):
    misfit(model, shard).backward()
    grads = ShardedGradients(model)
    grads.reduce()
    grads.gather()
