"""Vibration of turbines. Every rank opens the same file and draws its part with a sampler."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case

WINDOWS, SENSORS, READINGS = 16, 4, 10


class Recordings(Dataset):
    def __init__(self, tables):
        self.tables = tables

    def __len__(self):
        return len(self.tables["signal"])

    def __getitem__(self, number):
        return {name: table[number] for name, table in self.tables.items()}


@dataclass
class Job:
    world_size: int
    slot: int

    @classmethod
    def here(cls, rank):
        return cls(world_size=rank.world_size, slot=rank.local_rank)


class Every(Sampler):
    """Every world_size-th window from the job's slot on."""

    def __init__(self, data, job):
        self.numbers = range(job.slot, len(data) - len(data) % job.world_size, job.world_size)

    def __iter__(self):
        return iter(self.numbers)

    def __len__(self):
        return len(self.numbers)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.squeeze = nn.Linear(SENSORS * READINGS, 6)
        self.expand = nn.Linear(6, SENSORS * READINGS)

    def forward(self, signal):
        return self.expand(torch.sin(self.squeeze(signal.flatten(1)))).view_as(signal)


def make_batch(generator):
    return {
        "signal": torch.randn(WINDOWS, SENSORS, READINGS, generator=generator),
        "gain": torch.rand(WINDOWS, generator=generator) + 0.5,
    }


def loss(model, batch):
    error = (model(batch["signal"]) - batch["signal"]).abs().mean((1, 2))
    return (batch["gain"] * error).mean()


def step(model, tables, rank):
    data = Recordings(tables)
    job = Job.here(rank)
    sampler = Every(data, job)
    loader = DataLoader(data, batch_size=len(sampler), sampler=sampler)
    ddp = DistributedDataParallel(model)
    for batch in loader:
        loss(ddp, batch).backward()


case = Case(model=Autoencoder, batch=make_batch, loss=loss, layout="2x2", shards="own")
