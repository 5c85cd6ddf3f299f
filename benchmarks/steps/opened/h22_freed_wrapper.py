"""A VAE: the reconstruction is a mean over rows, the KL term comes from a small registry of penalties."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ROWS, PIXELS, LATENT = 16, 9, 3

PENALTIES: dict[str, Callable[..., Tensor]] = {}


def penalty(function):
    PENALTIES[function.__name__] = function
    return function


@penalty
def kl(model: Vae) -> Tensor:
    mean, log_variance = model.posterior
    each = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
    return each.sum() / len(each)


@penalty
def smoothness(model: Vae) -> Tensor:
    return model.decode.weight.diff(dim=0).square().mean()


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(PIXELS, 2 * LATENT)
        self.decode = nn.Linear(LATENT, PIXELS)
        self.posterior = None

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.posterior = self.encode(image).chunk(2, -1)
        return self.decode(mean + noise * (log_variance / 2).exp())


class Elbo:
    def __init__(self, **weights: float) -> None:
        self.weights = weights

    def penalties(self, model: Vae):
        for name, weight in self.weights.items():
            yield weight * PENALTIES[name](model)

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inner = getattr(model, "module", model)
        rebuilt = model(batch["image"], batch["noise"])
        reconstruction = (rebuilt - batch["image"]).square().sum(-1).mean()
        return reconstruction + sum(self.penalties(inner))


def faces(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "image": torch.randn(ROWS, PIXELS, generator=generator).cumsum(-1),
        "noise": torch.randn(ROWS, LATENT, generator=generator),
    }


elbo = Elbo(kl=0.7, smoothness=0.3)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return elbo(model, batch)


case = Case(model=Vae, batch=faces, loss=loss, layout="2x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    elbo(DistributedDataParallel(model), shard).backward()
