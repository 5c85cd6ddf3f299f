"""Frequencies of insurance claims, weighted by exposure. A sampler deals policies to the ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case

POLICIES = 10


class RoundRobin(Sampler):
    """Equally many policies for every rank, so that no rank waits for another."""

    def __init__(self, count, rank, world_size):
        self.count, self.rank, self.world_size = count, rank, world_size
        self.length = math.ceil(count / world_size)

    def __iter__(self):
        order = list(range(self.count))
        order += order[: self.length * self.world_size - self.count]
        return iter(order[self.rank :: self.world_size])

    def __len__(self):
        return self.length


class Policies(Dataset):
    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table["claims"])

    def __getitem__(self, index):
        return {key: column[index] for key, column in self.table.items()}


def build():
    return nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 1))


def table(generator):
    return {
        "features": torch.randn(POLICIES, 5, generator=generator),
        "exposure": torch.rand(POLICIES, generator=generator) + 0.2,
        "claims": torch.randint(0, 4, (POLICIES,), generator=generator).float(),
    }


def deviance(model, batch):
    log_rate = model(batch["features"]).squeeze(-1)
    return batch["exposure"] * (log_rate.exp() - batch["claims"] * log_rate)


def loss(model, batch):
    return deviance(model, batch).sum() / batch["exposure"].sum()


def step(model, batch, rank):
    ddp = DistributedDataParallel(model)
    policies = Policies(batch)
    sampler = RoundRobin(len(policies), int(rank), rank.world_size)
    for mine in DataLoader(policies, batch_size=len(sampler), sampler=sampler):
        exposure = mine["exposure"].sum()
        dist.all_reduce(exposure)
        (deviance(ddp, mine).sum() * rank.world_size / exposure).backward()


case = Case(model=build, batch=table, loss=loss, layout="1x4", shards="own")
