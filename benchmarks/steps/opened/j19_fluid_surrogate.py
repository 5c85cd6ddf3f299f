"""A convolutional surrogate for one time step of a fluid on a periodic grid, in channels-last."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

GRID, CHANNELS = 6, 4  # two velocities, pressure, dye


def periodic(inside: int, outside: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, padding=size // 2, padding_mode="circular")


class Surrogate(nn.Module):
    """Predicts the change of the fields, so that doing nothing is easy."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.enter = periodic(CHANNELS, width)
        self.inner = nn.ModuleList([periodic(width, width), periodic(width, width)])
        self.leave = nn.Conv2d(width, CHANNELS, 1)

    def forward(self, fields: Tensor) -> Tensor:
        x = torch.tanh(self.enter(fields))
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        return fields + self.leave(x)


def build() -> nn.Module:
    return Surrogate().to(memory_format=torch.channels_last)


def divergence(fields: Tensor) -> Tensor:
    right = fields[:, 0].roll(-1, dims=2) - fields[:, 0].roll(1, dims=2)
    down = fields[:, 1].roll(-1, dims=1) - fields[:, 1].roll(1, dims=1)
    return (right + down) / 2


def loss(model: nn.Module, batch: dict) -> Tensor:
    now = batch["now"].contiguous(memory_format=torch.channels_last)
    predicted = model(now)
    fit = (predicted - batch["next"]).square().mean()
    return fit + 0.1 * divergence(predicted).square().mean()


def simulations(generator: torch.Generator) -> dict:
    now = torch.randn(8, CHANNELS, GRID, GRID, generator=generator)
    mixed = (now + now.roll(1, 2) + now.roll(1, 3)) / 3
    return {"now": now, "next": mixed}


case = Case(model=build, batch=simulations, loss=loss, layout="1x2")


def averaged(train_step):
    """Decorates a function that leaves a rank's gradients: they become the mean over ranks."""

    @functools.wraps(train_step)
    def wrapper(model: nn.Module, shard: dict, rank) -> None:
        train_step(model, shard, rank)
        pending = []
        for parameter in model.parameters():
            flat = parameter.grad.reshape(-1)
            flat.div_(rank.world_size)
            pending.append((dist.all_reduce(flat, async_op=True), flat))
        for work, flat in pending:
            work.wait()

    return wrapper


@averaged
def step(model: nn.Module, shard: dict, rank) -> None:
    model.train()
    loss(model, shard).backward()
