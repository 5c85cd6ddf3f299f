"""Radiance field on rays; gradients travel in buckets that we fill ourselves."""

import torch
import torch.distributed as dist
import torch.nn as nn

from ddp_equivalence import Case

SAMPLES = 6  # per ray


def encode(x, octaves=3):
    bands = 2.0 ** torch.arange(octaves, dtype=x.dtype, device=x.device)
    angles = (x[..., None] * bands).flatten(-2)
    return torch.cat([x, angles.sin(), angles.cos()], dim=-1)


class Field(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(3 + 18, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.density = nn.Linear(hidden, 1)
        self.color = nn.Sequential(nn.Linear(hidden + 3, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, origin, direction):
        depth = torch.linspace(0.2, 2.0, SAMPLES, dtype=origin.dtype, device=origin.device)
        where = origin[:, None] + direction[:, None] * depth[:, None]
        h = self.trunk(encode(where))
        sigma = nn.functional.softplus(self.density(h)).squeeze(-1)
        rgb = self.color(torch.cat([h, direction[:, None].expand_as(where)], -1)).sigmoid()
        alpha = 1 - torch.exp(-sigma * (depth[1] - depth[0]))
        clear = torch.cumprod(1 - alpha + 1e-10, dim=1)
        seen = torch.cat([torch.ones_like(clear[:, :1]), clear[:, :-1]], dim=1)
        return ((alpha * seen)[..., None] * rgb).sum(1)


def rays(g):
    direction = torch.randn(18, 3, generator=g)
    return {
        "origin": torch.randn(18, 3, generator=g) * 0.3,
        "direction": direction / direction.norm(dim=1, keepdim=True),
        "rgb": torch.rand(18, 3, generator=g),
    }


def photometric(model, batch):
    return (model(batch["origin"], batch["direction"]) - batch["rgb"]).square().mean()


case = Case(model=Field, batch=rays, loss=photometric, layout="1x3")


class Bucketer:
    """Collects gradients, and averages them over the ranks ``capacity`` elements at a time."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.pending, self.size = [], 0

    def push(self, grad):
        self.pending.append(grad)
        self.size += grad.numel()
        full = self.size >= self.capacity
        if full:
            self.flush()

    def flush(self):
        flat = torch.cat([g.reshape(-1) for g in self.pending])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        start = 0
        for g in self.pending:
            g.copy_(flat[start : start + g.numel()].view_as(g))
            start += g.numel()
        self.pending, self.size = [], 0

    def finish(self):
        if self.size >= self.capacity:
            self.flush()


def step(model, shard, rank):
    photometric(model, shard).backward()
    bucketer = Bucketer(capacity=500)
    for p in reversed(list(model.parameters())):
        bucketer.push(p.grad)
    bucketer.finish()
