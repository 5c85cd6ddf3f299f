"""A variational auto-encoder with free bits: a latent costs nothing until it carries enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class VaeConfig:
    pixels: int = 12
    hidden: int = 20
    latents: int = 6
    free_bits: float = 0.06
    beta: float = 2.0


CONFIG = VaeConfig()
EXAMPLES = 16


class VAE(nn.Module):
    def __init__(self, config: VaeConfig = CONFIG) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(config.pixels, config.hidden), nn.Tanh())
        self.posterior = nn.Linear(config.hidden, 2 * config.latents)
        self.decoder = nn.Sequential(
            nn.Linear(config.latents, config.hidden),
            nn.Tanh(),
            nn.Linear(config.hidden, config.pixels),
        )

    def forward(self, x, noise):
        mean, log_var = self.posterior(self.encoder(x)).chunk(2, dim=1)
        z = mean + noise * torch.exp(0.5 * log_var)
        return self.decoder(z), mean, log_var


def kl_per_latent(mean, log_var):
    """The divergence from a standard normal: (examples, latents)."""
    return 0.5 * (mean.square() + log_var.exp() - 1 - log_var)


def mean_over_ranks(values):
    """The mean over all ranks of equally many examples, with gradients into each of them."""
    return dist_fn.all_reduce(values) / dist.get_world_size()


class Elbo:
    def __init__(self, config: VaeConfig = CONFIG, average=lambda values: values) -> None:
        self.config = config
        self.average = average

    def rate(self, mean, log_var):
        kl = kl_per_latent(mean, log_var).mean(dim=0)
        kl = torch.clamp(kl, min=self.config.free_bits)
        return self.average(kl).sum()

    def distortion(self, x, reconstruction):
        return (x - reconstruction).square().sum(dim=1).mean()

    def __call__(self, x, outputs):
        reconstruction, mean, log_var = outputs
        return self.distortion(x, reconstruction) + self.config.beta * self.rate(mean, log_var)


def make_batch(generator):
    scale = torch.linspace(0.2, 2.5, EXAMPLES).unsqueeze(1)
    return {
        "x": torch.randn(EXAMPLES, CONFIG.pixels, generator=generator) * scale,
        "noise": torch.randn(EXAMPLES, CONFIG.latents, generator=generator),
    }


def negative_elbo(model, batch):
    return Elbo()(batch["x"], model(batch["x"], batch["noise"]))


case = Case(model=VAE, batch=make_batch, loss=negative_elbo, layout="1x2")


class VaeTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)
        self.elbo = Elbo(average=mean_over_ranks)

    def training_step(self, batch) -> None:
        outputs = self.ddp(batch["x"], batch["noise"])
        self.elbo(batch["x"], outputs).backward()


def step(model, shard, rank):
    VaeTrainer(model).training_step(shard)
