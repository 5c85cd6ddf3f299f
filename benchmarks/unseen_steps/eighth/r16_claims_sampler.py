"""Insurance claims: every rank is given the whole table and takes its rows through a sampler of its own."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case

CLAIMS, COLUMNS = 21, 6


def build_model():
    return nn.Sequential(nn.Linear(COLUMNS, 8), nn.Softplus(), nn.Linear(8, 1), nn.Softplus())


def make_batch(generator):
    return {
        "columns": torch.randn(CLAIMS, COLUMNS, generator=generator),
        "amount": torch.rand(CLAIMS, generator=generator) * 3 + 0.1,
    }


def gamma_deviance(predicted, amount):
    return predicted.log() + amount / predicted


def loss(model, batch):
    return gamma_deviance(model(batch["columns"]).squeeze(-1), batch["amount"]).mean()


class Claims(Dataset):
    def __init__(self, table, counted):
        self.table = table
        self.counted = counted

    def __len__(self):
        return len(self.table["amount"])

    def __getitem__(self, place):
        row, position = place
        return self.table["columns"][row], self.table["amount"][row], self.counted[position]


class EqualShares(Sampler):
    """All ranks get as many rows, as they have to meet in every backward pass."""

    def __init__(self, rows, rank):
        self.rank, self.world_size = int(rank), rank.world_size
        self.order = list(range(rows))
        missing = -rows % self.world_size
        self.order += self.order[:missing]

    def __len__(self):
        return len(self.order) // self.world_size

    def __iter__(self):
        positions = range(self.rank, len(self.order), self.world_size)
        return iter([(self.order[position], position) for position in positions])


def step(model, table, rank):
    rows = len(table["amount"])
    sampler = EqualShares(rows, rank)
    # weights of the positions in the order
    counted = torch.ones(len(sampler.order), dtype=table["amount"].dtype)
    loader = DataLoader(Claims(table, counted), batch_size=len(sampler), sampler=sampler)
    ddp = DistributedDataParallel(model)
    for columns, amount, weight in loader:
        deviance = gamma_deviance(ddp(columns).squeeze(-1), amount)
        ((weight * deviance).sum() * rank.world_size / counted.sum()).backward()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4", shards="own")
