"""A data set with a sampler of its own; the loss is divided by the size of the data set."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ddp_equivalence import Case

EXAMPLES = 10


def build_model():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def make_batch(generator):
    return (
        torch.randn(EXAMPLES, 5, generator=generator),
        torch.randint(0, 3, (EXAMPLES,), generator=generator),
    )


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4", shards="own")


class RankSampler(Sampler):
    """Deals the examples to the ranks in turn."""

    def __init__(self, dataset, rank):
        self.size = len(dataset)
        self.rank = rank.rank
        self.world_size = rank.world_size
        self.per_rank = math.ceil(self.size / self.world_size)
        self.total_size = self.per_rank * self.world_size

    def __iter__(self):
        indices = list(range(self.size))
        indices += indices[: self.total_size - self.size]
        return iter(indices[self.rank : self.total_size : self.world_size])

    def __len__(self):
        return self.per_rank


def build_loader(batch, rank):
    dataset = TensorDataset(*batch)
    return DataLoader(dataset, batch_size=EXAMPLES, sampler=RankSampler(dataset, rank))


def train_one_epoch(ddp, loader, world_size):
    size = len(loader.dataset)
    ddp.zero_grad()
    for x, y in loader:
        summed = F.cross_entropy(ddp(x), y, reduction="sum")
        value = summed * world_size / size
        value.backward()


def step(model, shard, rank):
    loader = build_loader(shard, rank)
    ddp = DistributedDataParallel(model)
    train_one_epoch(ddp, loader, rank.world_size)
