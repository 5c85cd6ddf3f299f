"""A variational autoencoder of galaxy spectra. The noise is part of the batch; weights have a Gaussian prior."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

GALAXIES, WAVELENGTHS, LATENT = 20, 14, 3
BETA = 0.5
PRIOR = 2.0


class SpectrumVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(WAVELENGTHS, 2 * LATENT)
        self.decode = nn.Sequential(nn.Linear(LATENT, 9), nn.Tanh(), nn.Linear(9, WAVELENGTHS))

    def forward(self, flux, noise):
        mean, log_var = self.encode(flux).chunk(2, dim=-1)
        latent = mean + noise * (0.5 * log_var).exp()
        return self.decode(latent), mean, log_var


def make_batch(generator):
    return {
        "flux": torch.randn(GALAXIES, WAVELENGTHS, generator=generator),
        "noise": torch.randn(GALAXIES, LATENT, generator=generator),
        "observed": (torch.rand(GALAXIES, WAVELENGTHS, generator=generator) < 0.8).float(),
    }


def elbo_sum(model, batch):
    rebuilt, mean, log_var = model(batch["flux"], batch["noise"])
    misfit = (batch["observed"] * (rebuilt - batch["flux"]) ** 2).sum()
    divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()
    return misfit + BETA * divergence


def prior(model):
    return PRIOR * sum(p.square().sum() for p in model.parameters())


def loss(model, batch):
    return (elbo_sum(model, batch) + prior(model)) / len(batch["flux"])


def flatten(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def unflatten(flat, model):
    start = 0
    for parameter in model.parameters():
        stop = start + parameter.numel()
        parameter.grad.copy_(flat[start:stop].view_as(parameter))
        start = stop


def step(model, shard, rank):
    galaxies = torch.tensor(len(shard["flux"]))
    dist.all_reduce(galaxies)
    objective = elbo_sum(model, shard) + prior(model)
    objective.backward()
    # sums on every rank, so the sum of all gradients over the number of all galaxies
    flat = flatten(model)
    dist.all_reduce(flat)
    unflatten(flat / galaxies, model)


case = Case(model=SpectrumVAE, batch=make_batch, loss=loss, layout="1x2")
