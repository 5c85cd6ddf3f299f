"""The composable replicate on a 1-D mesh, with two losses and accumulated gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ddp_equivalence import Case


class Vae(nn.Module):
    """Its noise is part of the batch."""

    def __init__(self, size: int = 8, latent: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, 12), nn.Tanh(), nn.Linear(12, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 12), nn.Tanh(), nn.Linear(12, size))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        latent = mean + (log_variance / 2).exp() * noise
        return self.decoder(latent), mean, log_variance


def evidence(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    decoded, mean, log_variance = model(batch["x"], batch["noise"])
    error = F.mse_loss(decoded, batch["x"], reduction="none").sum(dim=1)
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
    return error.mean(), divergence.mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    error, divergence = evidence(model, batch)
    return error + 0.2 * divergence


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(16, 8, generator=generator),
        "noise": torch.randn(16, 3, generator=generator),
    }


def halves(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    middle = len(batch["x"]) // 2
    return [
        {name: tensor[:middle] for name, tensor in batch.items()},
        {name: tensor[middle:] for name, tensor in batch.items()},
    ]


def step(model: Vae, shard: dict[str, Tensor], rank) -> None:
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("replicate",))
    replicate(model.encoder, mesh=mesh)
    replicate(model.decoder, mesh=mesh)
    model = replicate(model, mesh=mesh)
    first, second = halves(shard)

    model.set_requires_gradient_sync(False)
    (loss(model, first) / 2).backward()

    model.set_requires_gradient_sync(True)
    error, divergence = evidence(model, second)
    ((error + 0.2 * divergence) / 2).backward()


case = Case(model=Vae, batch=make_batch, loss=loss, layout="1x2")
