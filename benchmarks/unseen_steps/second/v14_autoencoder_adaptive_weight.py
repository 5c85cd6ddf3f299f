"""The first stage of a latent model: reconstruction and a critic, balanced by their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class FirstStageConfig:
    critic_factor: float = 0.8
    largest_weight: float = 1e4


CONFIG = FirstStageConfig()


class FirstStage(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 2, stride=2), nn.SiLU())
        self.latent = nn.Conv2d(width, 4, 1)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(4, width, 2, stride=2), nn.SiLU())
        self.to_image = nn.Conv2d(width, 3, 3, padding=1)
        self.critic = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(96, 1)
        ).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.to_image(self.decoder(self.latent(self.encoder(images))))


def images(generator: torch.Generator) -> Batch:
    scale = torch.linspace(0.2, 2.0, 12).view(-1, 1, 1, 1)
    return {"images": scale * torch.randn(12, 3, 6, 6, generator=generator)}


def losses(model: FirstStage, reconstructed: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    reconstruction = (reconstructed - batch["images"]).abs().mean()
    return reconstruction, F.softplus(-model.critic(reconstructed)).mean()


def adaptive_weight(reconstruction: Tensor, adversarial: Tensor) -> Tensor:
    """From the gradients of both losses in the weights of the last layer."""
    weight = reconstruction.norm() / (adversarial.norm() + 1e-4)
    return weight.clamp(0.0, CONFIG.largest_weight).detach()


def gradient_at(layer: nn.Conv2d, value: Tensor) -> Tensor:
    return torch.autograd.grad(value, layer.weight, retain_graph=True)[0]


def loss(model: FirstStage, batch: Batch) -> Tensor:
    reconstruction, adversarial = losses(model, model(batch["images"]), batch)
    gradients = [gradient_at(model.to_image, value) for value in (reconstruction, adversarial)]
    return reconstruction + CONFIG.critic_factor * adaptive_weight(*gradients) * adversarial


class FirstStageTrainer:
    def __init__(self, model: FirstStage) -> None:
        self.ddp = DistributedDataParallel(model)
        self.last_layer = model.to_image
        self.log: dict[str, float] = {}

    def log_mean(self, name: str, value: Tensor) -> None:
        shown = value.detach().clone()
        dist.all_reduce(shown)
        self.log[name] = shown.item() / dist.get_world_size()

    def train_step(self, batch: Batch) -> None:
        reconstructed = self.ddp(batch["images"])
        reconstruction, adversarial = losses(self.ddp.module, reconstructed, batch)
        gradients = [gradient_at(self.last_layer, value) for value in (reconstruction, adversarial)]
        weight = adaptive_weight(*gradients)
        self.log_mean("critic/weight", weight)
        (reconstruction + CONFIG.critic_factor * weight * adversarial).backward()


case = Case(model=FirstStage, batch=images, loss=loss, layout="1x3")


def step(model: FirstStage, shard: Batch, rank: Rank) -> None:
    FirstStageTrainer(model).train_step(shard)
