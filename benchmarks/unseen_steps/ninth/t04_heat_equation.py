"""A physics-informed network for u_t = k u_xx. Gradients travel in chunks of fixed length."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

POINTS = 16
DIFFUSIVITY = 0.1
CHUNK = 64  # elements per message


class Field(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, points):
        return self.net(points).squeeze(-1)


def collocation(generator):
    points = torch.rand(POINTS, 2, generator=generator)
    at_start = points.clone()
    at_start[:, 1] = 0
    return {
        "points": points,
        "at_start": at_start,
        "profile": torch.sin(torch.pi * at_start[:, 0]),
    }


def residual(model, points):
    points = points.detach().requires_grad_()
    u = model(points)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    u_x, u_t = first[:, 0], first[:, 1]
    (second,) = torch.autograd.grad(u_x.sum(), points, create_graph=True)
    return u_t - DIFFUSIVITY * second[:, 0]


def loss(model, batch):
    physics = residual(model, batch["points"]).square().mean()
    start = (model(batch["at_start"]) - batch["profile"]).square().mean()
    return physics + start


def pack(parameters):
    return torch.cat([p.grad.reshape(-1) for p in parameters])


def unpack(flat, parameters):
    offset = 0
    for p in parameters:
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def chunked_mean(flat, world_size):
    """Averages in place, one message per chunk, all in flight at once."""
    messages = flat.numel() // CHUNK
    handles = []
    for number in range(messages):
        piece = flat[number * CHUNK : (number + 1) * CHUNK]
        piece.div_(world_size)
        handles.append(dist.all_reduce(piece, async_op=True))
    for handle in handles:
        handle.wait()


def step(model, shard, rank):
    loss(model, shard).backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    flat = pack(parameters)
    chunked_mean(flat, rank.world_size)
    unpack(flat, parameters)


case = Case(model=Field, batch=collocation, loss=loss, layout="1x2")
