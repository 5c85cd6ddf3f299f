"""A denoiser. The times of a batch are spread evenly; hooks average gradients as they come."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

PIXELS = 9
Batch = dict[str, Tensor]


class Denoiser(nn.Module):
    """Predicts the noise from the noisy picture and a few waves of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(4, 12)
        self.picture = nn.Linear(PIXELS, 12)
        self.noise = nn.Linear(12, PIXELS)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        angles = math.pi * times[:, None] * torch.tensor([1, 2]).to(times)
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        return self.noise(F.silu(self.picture(noisy) + self.time(waves)))


def spread_times(offset: Tensor, first: int, count: int, total: int) -> Tensor:
    """Of ``total`` evenly spread times, ``count`` from number ``first`` on."""
    numbers = torch.arange(first, first + count, dtype=offset.dtype, device=offset.device)
    return (offset + numbers / total) % 1


def denoising_loss(model: nn.Module, batch: Batch, times: Tensor) -> Tensor:
    angle = times[:, None] * math.pi / 2
    noisy = angle.cos() * batch["pictures"] + angle.sin() * batch["noise"]
    return F.mse_loss(model(noisy, times), batch["noise"])


def loss(model: nn.Module, batch: Batch) -> Tensor:
    count = len(batch["pictures"])
    return denoising_loss(model, batch, spread_times(batch["offset"], 0, count, count))


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "pictures": torch.rand(16, PIXELS, generator=generator),
        "noise": torch.randn(16, PIXELS, generator=generator),
        "offset": torch.rand(1, generator=generator),
    }


case = Case(model=Denoiser, batch=make_batch, loss=loss, layout="1x4", batch_dims={"offset": None})


def average_on_arrival(model: nn.Module, world_size: int) -> list:
    def average(parameter: Tensor) -> None:
        parameter.grad.div_(world_size)
        dist.all_reduce(parameter.grad)

    return [p.register_post_accumulate_grad_hook(average) for p in model.parameters()]


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    model.zero_grad()
    handles = average_on_arrival(model, rank.world_size)
    count = len(shard["pictures"])
    total = count * rank.world_size
    times = spread_times(shard["offset"], rank.rank, count, total)
    denoising_loss(model, shard, times).backward()
    for handle in handles:
        handle.remove()
