"""A VAE for catalogue thumbnails with ZeRO-like sharding of gradients: each rank owns a part of
one flat buffer. For the check the parts are put together again at the end."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

LATENT, BETA, ALIGNMENT = 5, 0.3, 64


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.ELU(), nn.Flatten(), nn.Linear(6 * 16, 2 * LATENT)
        )
        self.decode = nn.Sequential(nn.Linear(LATENT, 24), nn.ELU(), nn.Linear(24, 64))

    def forward(self, x, noise):
        mean, log_var = self.encode(x).chunk(2, dim=1)
        z = mean + (0.5 * log_var).exp() * noise
        return self.decode(z).view_as(x), mean, log_var


def thumbnails(generator):
    return {
        "x": torch.rand(12, 1, 8, 8, generator=generator),
        "noise": torch.randn(12, LATENT, generator=generator),
    }


def loss(model, batch):
    logits, mean, log_var = model(batch["x"], batch["noise"])
    nats = nn.functional.binary_cross_entropy_with_logits(logits, batch["x"], reduction="none")
    kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)
    return (nats.flatten(1).sum(1) + BETA * kl).mean()


case = Case(model=VAE, batch=thumbnails, loss=loss, layout="1x3")


class FlatGradients:
    """All gradients one after another in one buffer, of which every parameter has a view."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        total = sum(p.numel() for p in self.parameters)
        self.buffer = self.parameters[0].new_zeros(total)
        offset = 0
        for p in self.parameters:
            p.grad = self.buffer[offset : offset + p.numel()].view_as(p)
            offset += p.numel()

    def partition(self, parts):
        """Cut points of equal parts, aligned for vectorised kernels."""
        size = len(self.buffer) // parts // ALIGNMENT * ALIGNMENT
        return [(part * size, (part + 1) * size) for part in range(parts)]


class ShardedGradients:
    def __init__(self, flat):
        self.flat = flat
        self.world_size = dist.get_world_size()
        self.parts = flat.partition(self.world_size)

    def reduce_to_owners(self):
        for owner, (start, end) in enumerate(self.parts):
            part = self.flat.buffer[start:end]
            dist.reduce(part, dst=owner)
            part /= self.world_size

    def collect(self):
        for owner, (start, end) in enumerate(self.parts):
            dist.broadcast(self.flat.buffer[start:end], src=owner)


def step(model, shard, rank):
    sharded = ShardedGradients(FlatGradients(model.parameters()))
    loss(model, shard).backward()
    sharded.reduce_to_owners()
    sharded.collect()
