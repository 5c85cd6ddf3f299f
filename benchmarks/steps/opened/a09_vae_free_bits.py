"""VAE with free bits (a floor on the KL of each latent dimension, as in IAF).

The floor is applied to the batch mean of a dimension's KL, so dimensions near the floor
are switched on and off together for the whole batch.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

DATA, LATENT, EXAMPLES = 10, 6, 16
FREE_NATS = 0.06
BETA = 0.7


class Batch(NamedTuple):
    x: Tensor
    noise: Tensor


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DATA, 16), nn.ELU(), nn.Linear(16, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 16), nn.ELU(), nn.Linear(16, DATA))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, log_var = self.encoder(x).chunk(2, dim=-1)
        z = mu + noise * (0.5 * log_var).exp()
        return self.decoder(z), mu, log_var


def draw(g: torch.Generator) -> Batch:
    scale = torch.linspace(0.2, 3.0, EXAMPLES)[:, None]
    return Batch(torch.randn(EXAMPLES, DATA, generator=g) * scale, torch.randn(EXAMPLES, LATENT, generator=g))


Mean = Callable[[Tensor], Tensor]


def over_rows(values: Tensor) -> Tensor:
    return values.mean(0)


def over_rows_of_all_ranks(values: Tensor) -> Tensor:
    return all_reduce(values.mean(0)) / dist.get_world_size()


def negative_elbo(outputs: tuple[Tensor, ...], x: Tensor, mean: Mean = over_rows) -> Tensor:
    decoded, mu, log_var = outputs
    distortion = (decoded - x).square().sum(-1).mean()
    kl = 0.5 * (mu.square() + log_var.exp() - log_var - 1)
    rate = mean(kl).clamp(min=FREE_NATS).sum()
    return distortion + BETA * rate


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return negative_elbo(model(*batch), batch.x)


class ElboStep:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)
        self.mean = over_rows_of_all_ranks if dist.is_initialized() else over_rows
        self.history: list[float] = []

    def __call__(self, batch: Batch) -> None:
        value = negative_elbo(self.ddp(*batch), batch.x)
        value.backward()
        self.history.append(float(self.mean(value.detach()[None])))


def step(model: nn.Module, shard: Batch, rank) -> None:
    ElboStep(model)(Batch(*shard))


case = Case(model=VAE, batch=draw, loss=loss, layout="1x2")
