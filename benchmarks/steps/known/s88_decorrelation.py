"""Two views of an image; variance and covariance of the embeddings are kept in shape."""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

SIM, STD, COV = 2.0, 2.0, 0.5


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))

    def forward(self, x):
        return self.net(x)


def regularizer(cov):
    std = torch.sqrt(cov.diagonal() + 1e-4)
    off_diagonal = cov - torch.diag(cov.diagonal())
    return STD * F.relu(1 - std).mean() + COV * off_diagonal.square().sum() / len(cov)


def covariance(z):
    z = z - z.mean(0)
    return z.T @ z / len(z)


def loss(model, batch):
    first, second = model(batch["first"]), model(batch["second"])
    return SIM * F.mse_loss(first, second) + sum(
        regularizer(covariance(z)) for z in (first, second)
    )


def make_batch(generator):
    image = torch.randn(12, 6, generator=generator)
    image[:6] += 0.7  # taken in another light
    noise = torch.randn(2, 12, 6, generator=generator)
    return {"first": image + 0.2 * noise[0], "second": image + 0.2 * noise[1]}


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x2")


class VicReg(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.world_size = dist.get_world_size()

    def global_mean(self, value):
        return torch.distributed.nn.all_reduce(value) / self.world_size

    def global_covariance(self, z):
        centred = z - z.mean(0)
        return self.global_mean(centred.T @ centred / len(z))

    def forward(self, first, second):
        first, second = self.encoder(first), self.encoder(second)
        value = SIM * F.mse_loss(first, second)
        for z in (first, second):
            value = value + regularizer(self.global_covariance(z))
        return value


def step(model, shard, rank):
    model.zero_grad()
    wrapped = DDP(VicReg(model))
    wrapped(shard["first"], shard["second"]).backward()
