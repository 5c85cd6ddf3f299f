"""Image denoising in the channels_last memory format, with a reduction of our own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class DenoiserConfig:
    channels: int = 8
    memory_format: torch.memory_format = torch.channels_last
    edge_weight: float = 0.3


CONFIG = DenoiserConfig()


class Denoiser(nn.Module):
    """Predicts the noise, conditioned on its level."""

    def __init__(self, config: DenoiserConfig = CONFIG) -> None:
        super().__init__()
        width = config.channels
        self.level = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.encode = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.decode = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy: Tensor, sigma: Tensor) -> Tensor:
        shift = self.level(sigma[:, None])[:, :, None, None]
        return self.decode(F.silu(self.norm(self.encode(noisy)) + shift))


def noisy_images(generator: torch.Generator) -> Batch:
    clean = torch.randn(12, 3, 6, 6, generator=generator)
    noise = torch.randn(12, 3, 6, 6, generator=generator)
    sigma = torch.rand(12, generator=generator) + 0.1
    return {"noisy": clean + sigma[:, None, None, None] * noise, "noise": noise, "sigma": sigma}


def edges(images: Tensor) -> Tensor:
    return images[..., 1:] - images[..., :-1]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    noisy = batch["noisy"].contiguous(memory_format=CONFIG.memory_format)
    predicted = model(noisy, batch["sigma"])
    error = F.mse_loss(predicted, batch["noise"])
    return error + CONFIG.edge_weight * F.l1_loss(edges(predicted), edges(batch["noise"]))


def all_reduce_mean(tensors: Iterable[Tensor]) -> None:
    """Averages every tensor over the ranks, in place."""
    world_size = dist.get_world_size()
    for tensor in tensors:
        tensor.div_(world_size)
        dist.all_reduce(tensor.contiguous())


class DenoisingTrainer:
    def __init__(self, model: nn.Module, config: DenoiserConfig) -> None:
        self.model = model.to(memory_format=config.memory_format)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def train_step(self, batch: Batch) -> None:
        loss(self.model, batch).backward()
        all_reduce_mean(self.gradients())


case = Case(model=Denoiser, batch=noisy_images, loss=loss, layout="1x3")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    DenoisingTrainer(model, CONFIG).train_step(shard)
