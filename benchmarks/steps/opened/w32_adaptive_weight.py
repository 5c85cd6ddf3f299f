"""An autoencoder with two losses; the second is weighted by the ratio of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

PIXELS, CODE, EXAMPLES = 12, 4, 16


@dataclass(frozen=True)
class LossConfig:
    perceptual_share: float = 0.8
    epsilon: float = 1e-4
    largest_weight: float = 1e4


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 10), nn.Tanh(), nn.Linear(10, CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, 10), nn.Tanh())
        self.to_pixels = nn.Linear(10, PIXELS)
        features = torch.Generator().manual_seed(7)
        self.register_buffer("perceptual", torch.randn(PIXELS, 5, generator=features))

    def forward(self, images: Tensor) -> Tensor:
        return self.to_pixels(self.decoder(self.encoder(images)))


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value.detach().clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def gradient_norm(value: Tensor, weight: Tensor) -> Tensor:
    """Norm of the gradient that a loss sends into the last layer."""
    (grad,) = torch.autograd.grad(value, weight, retain_graph=True)
    return mean_over_ranks(grad.norm())


def adaptive_weight(main: Tensor, other: Tensor, layer: nn.Linear, config: LossConfig) -> Tensor:
    main_norm = gradient_norm(main, layer.weight)
    other_norm = gradient_norm(other, layer.weight)
    weight = main_norm / (other_norm + config.epsilon)
    return config.perceptual_share * weight.clamp(max=config.largest_weight)


def total_loss(model: AutoEncoder, batch: dict[str, Tensor]) -> Tensor:
    config = LossConfig()
    images = batch["images"]
    decoded = model(images)
    reconstruction = F.mse_loss(decoded, images)
    perceptual = F.l1_loss(
        torch.tanh(decoded @ model.perceptual), torch.tanh(images @ model.perceptual)
    )
    weight = adaptive_weight(reconstruction, perceptual, model.to_pixels, config)
    return reconstruction + weight * perceptual


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"images": torch.randn(EXAMPLES, PIXELS, generator=generator)}


class Trainer:
    def __init__(self, model: AutoEncoder) -> None:
        self.model = model

    @torch.no_grad()
    def synchronise(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = mean_over_ranks(parameter.grad)

    def step(self, batch: dict[str, Tensor]) -> float:
        self.model.zero_grad()
        value = total_loss(self.model, batch)
        value.backward()
        self.synchronise()
        return value.item()


case = Case(model=AutoEncoder, batch=make_batch, loss=total_loss, layout="2x2")


def step(model, shard, rank):
    Trainer(model).step(shard)
