"""Photometric redshifts from a small catalogue; ten galaxies do not divide by four ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from ddp_equivalence import Case

BANDS, GALAXIES = 5, 10


def network():
    return nn.Sequential(nn.Linear(BANDS, 16), nn.SiLU(), nn.Linear(16, 2))


def negative_log_likelihood(model, magnitudes, redshift):
    mean, log_sigma = model(magnitudes).unbind(-1)
    return 0.5 * ((redshift - mean) / log_sigma.exp()).square() + log_sigma


def loss(model, catalogue):
    return negative_log_likelihood(model, *catalogue).mean()


def catalogue(generator):
    magnitudes = torch.randn(GALAXIES, BANDS, generator=generator)
    return magnitudes, magnitudes.diff(dim=1).abs().sum(1) / 3


# every rank reads the whole catalogue and takes its galaxies
case = Case(model=network, batch=catalogue, loss=loss, layout="1x4", shards="own")


def my_galaxies(data, rank):
    """The rank's rows of the catalogue: rank, rank + 4, ...

    Not shuffled, so that runs can be compared.
    """
    sampler = DistributedSampler(
        data, num_replicas=rank.world_size, rank=rank.rank, shuffle=False
    )
    return Subset(data, list(sampler))


def step(model, batch, rank):
    dataset = my_galaxies(TensorDataset(*batch), rank)
    for magnitudes, redshift in DataLoader(dataset, batch_size=2):
        # two batches on some ranks: sums, not means
        (negative_log_likelihood(model, magnitudes, redshift).sum() / GALAXIES).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
