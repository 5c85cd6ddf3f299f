"""Churn prediction from a table: each rank draws its part of an epoch with its own sampler."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case

SEED, CUSTOMERS = 1234, 32


class Customers(Dataset):
    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table["churned"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.table.items()}


class ShuffledPart(Sampler):
    """Every world_size-th row of a shuffled epoch, beginning with row `rank`."""

    def __init__(self, dataset, rank, world_size, seed):
        self.dataset = dataset
        self.rank, self.world_size = rank, world_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        return iter(order[self.rank :: self.world_size])

    def __len__(self):
        return len(self.dataset) // self.world_size


def make_loader(table, rank):
    dataset = Customers(table)
    sampler = ShuffledPart(dataset, rank.rank, rank.world_size, seed=SEED + rank.rank)
    sampler.set_epoch(1)
    return DataLoader(dataset, batch_size=len(sampler), sampler=sampler)


def build():
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))


def table(generator):
    return {
        "columns": torch.randn(CUSTOMERS, 10, generator=generator),
        "churned": torch.randint(2, (CUSTOMERS,), generator=generator).float(),
    }


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["columns"]), batch["churned"])


def step(model, batch, rank):
    ddp = DistributedDataParallel(model)
    for rows in make_loader(batch, rank):
        loss(ddp, rows).backward()


case = Case(model=build, batch=table, loss=loss, shards="own")
