"""Every worker holds the whole data set of an epoch and takes its part of a shuffled order."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case

SEED = 1234


class Rows(Dataset):
    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["spectrum"])

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.batch.items()}


class ShuffledPart(Sampler):
    """A permutation of the epoch, dealt in turn to the ranks."""

    def __init__(self, size, rank, epoch=0):
        self.size, self.rank, self.epoch = size, rank, epoch

    def __len__(self):
        return self.size // self.rank.world_size

    def __iter__(self):
        generator = torch.Generator()
        generator.manual_seed(SEED + self.epoch + self.rank.rank)
        order = torch.randperm(self.size, generator=generator).tolist()
        return iter(order[self.rank.rank :: self.rank.world_size])


def build():
    return nn.Sequential(
        nn.Unflatten(1, (1, 20)),
        nn.Conv1d(1, 6, 5),
        nn.ReLU(),
        nn.AvgPool1d(4),
        nn.Flatten(),
        nn.Linear(24, 2),
    )


def spectra(generator):
    spectrum = torch.randn(24, 20, generator=generator).cumsum(dim=1)
    return {
        "spectrum": spectrum,
        "concentration": torch.rand(24, 2, generator=generator),
        "noise": 0.5 + torch.rand(24, generator=generator),
    }


def loss(model, batch):
    error = model(batch["spectrum"]) - batch["concentration"]
    return (error.pow(2).sum(dim=1) / batch["noise"].pow(2)).mean()


def step(model, epoch, rank):
    data = Rows(epoch)
    sampler = ShuffledPart(len(data), rank)
    ddp = DistributedDataParallel(model)
    for part in DataLoader(data, batch_size=len(sampler), sampler=sampler):
        loss(ddp, part).backward()


case = Case(model=build, batch=spectra, loss=loss, layout="1x2", shards="own")
