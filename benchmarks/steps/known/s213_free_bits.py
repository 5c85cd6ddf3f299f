"""A variational autoencoder with free bits: what a latent costs, up to a limit, is not penalized.

The limit is compared with the mean cost in the whole batch. The noise comes with the data.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]
LATENTS, FREE = 6, 0.04


class Autoencoder(nn.Module):
    def __init__(self, size: int = 10, width: int = 12) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(size, width), nn.Tanh())
        self.posterior = nn.Linear(width, 2 * LATENTS)
        self.decode = nn.Sequential(nn.Linear(LATENTS, width), nn.Tanh(), nn.Linear(width, size))

    def forward(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.posterior(self.encode(pixels)).chunk(2, dim=-1)
        latent = mean + noise * (log_variance / 2).exp()
        cost = (mean.square() + log_variance.exp() - 1 - log_variance) / 2
        return self.decode(latent), cost


def reconstruction(logits: Tensor, pixels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum") / len(pixels)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits, cost = model(batch["pixels"], batch["noise"])
    return reconstruction(logits, batch["pixels"]) + cost.mean(0).clamp(min=FREE).sum()


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "pixels": torch.rand(12, 10, generator=generator),
        "noise": torch.randn(12, LATENTS, generator=generator),
    }


case = Case(model=Autoencoder, batch=make_batch, loss=loss, layout="1x4")


class FreeBits:
    """Leaves out the latents that cost less than the limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.mean_cost = torch.zeros(LATENTS)

    def __call__(self, cost: Tensor) -> Tensor:
        own = cost.mean(0)
        self.mean_cost = own.detach().clone()
        dist.all_reduce(self.mean_cost)
        self.mean_cost /= dist.get_world_size()
        charged = own > self.limit
        return own[charged].sum()

    def collapsed(self) -> int:
        return int((self.mean_cost < self.limit).sum())


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)
        self.free_bits = FreeBits(FREE)
        self.log: list[tuple[float, int]] = []

    def train_on(self, batch: Batch) -> None:
        logits, cost = self.ddp(batch["pixels"], batch["noise"])
        value = reconstruction(logits, batch["pixels"]) + self.free_bits(cost)
        value.backward()
        self.log.append((value.item(), self.free_bits.collapsed()))


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Trainer(model).train_on(shard)
