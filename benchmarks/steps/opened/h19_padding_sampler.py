"""Ten rows on three ranks. The sampler can fill up the last round, and the loss knows how many rows there are."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

from ddp_equivalence import Case


@dataclass
class Data:
    even: bool = True  # all ranks get the same number of rows
    batch_size: int = 2


@dataclass
class Config:
    rows: int = 10
    data: Data = field(default_factory=Data)


class Deal(Sampler):
    """Deals numbers like cards."""

    def __init__(self, rows, rank, config):
        self.rows, self.rank, self.config = rows, rank, config

    def order(self):
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(7)).tolist()

    def __iter__(self):
        order = self.order()
        if self.config.even:
            missing = -len(order) % self.rank.world_size
            order += order[:missing]
        yield from order[self.rank.rank :: self.rank.world_size]


class Pose(nn.Module):
    """From detected key points to the angles of the joints."""

    def __init__(self, points=5, joints=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * points, 14), nn.Tanh(), nn.Linear(14, 2 * joints))

    def forward(self, points):
        return F.normalize(self.net(points.flatten(1)).unflatten(1, (-1, 2)), dim=-1)


def angular(model, points, angles):
    """Sum over rows of the mean over joints."""
    truth = torch.stack([angles.cos(), angles.sin()], -1)
    return (1 - (model(points) * truth).sum(-1)).mean(-1).sum()


def people(generator):
    points = torch.randn(Config.rows, 5, 2, generator=generator)
    return points, torch.rand(Config.rows, 3, generator=generator) * 6.28


def loss(model, batch):
    return angular(model, *batch) / len(batch[0])


class Trainer:
    def __init__(self, model, config, rank):
        self.model, self.config, self.rank = model, config, rank

    def loader(self, batch):
        sampler = Deal(len(batch[0]), self.rank, self.config.data)
        batches = BatchSampler(sampler, self.config.data.batch_size, drop_last=False)
        return DataLoader(TensorDataset(*batch), batch_sampler=batches)

    def accumulate(self, batch):
        for points, angles in self.loader(batch):
            (angular(self.model, points, angles) / self.config.rows).backward()
        self.reduce()

    def reduce(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


case = Case(model=Pose, batch=people, loss=loss, layout="1x3", shards="own")


def step(model, batch, rank):
    Trainer(model, Config(), rank).accumulate(batch)
