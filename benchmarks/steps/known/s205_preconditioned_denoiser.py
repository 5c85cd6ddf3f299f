"""A diffusion model with preconditioned inputs and outputs.

The weight of a noise level is the inverse square of the scale of the output, so the step compares
the raw output of the network with its raw target, and weighs nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

DATA_STD = 0.5


@dataclass
class Noised:
    clean: Tensor
    noise: Tensor
    sigma: Tensor


class Scales(NamedTuple):
    skip: Tensor
    output: Tensor
    input: Tensor
    noise: Tensor


def scales_at(sigma: Tensor) -> Scales:
    variance = sigma.square() + DATA_STD**2
    return Scales(
        skip=DATA_STD**2 / variance,
        output=sigma * DATA_STD / variance.sqrt(),
        input=variance.rsqrt(),
        noise=sigma.log() / 4,
    )


class Network(nn.Module):
    def __init__(self, size: int = 6, width: int = 12) -> None:
        super().__init__()
        self.enter = nn.Linear(size, width)
        self.level = nn.Linear(1, width)
        self.leave = nn.Linear(width, size)

    def forward(self, signal: Tensor, level: Tensor) -> Tensor:
        return self.leave(F.silu(self.enter(signal) + self.level(level)))


def loss(model: nn.Module, batch: Noised) -> Tensor:
    scales = scales_at(batch.sigma)
    noisy = batch.clean + batch.sigma * batch.noise
    raw = model(scales.input * noisy, scales.noise)
    denoised = scales.skip * noisy + scales.output * raw
    return ((denoised - batch.clean) / scales.output).square().mean()


def make_batch(generator: torch.Generator) -> Noised:
    return Noised(
        clean=DATA_STD * torch.randn(12, 6, generator=generator),
        noise=torch.randn(12, 6, generator=generator),
        sigma=(1.2 * torch.randn(12, 1, generator=generator) - 1.2).exp(),
    )


case = Case(model=Network, batch=make_batch, loss=loss, layout="1x3")


class DiffusionTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)

    def train_on(self, batch: Noised) -> float:
        scales = scales_at(batch.sigma)
        noisy = batch.clean + batch.sigma * batch.noise
        target = (batch.clean - scales.skip * noisy) / scales.output
        value = F.mse_loss(self.ddp(noisy, scales.noise), target)
        value.backward()
        self.optimizer.step()
        return value.item()


def step(model: nn.Module, shard: Noised, rank: Rank) -> None:
    DiffusionTrainer(model).train_on(shard)
