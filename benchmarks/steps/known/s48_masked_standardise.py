"""Hidden features are standardised with the statistics of the valid rows of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

from ddp_equivalence import Case

EPSILON = 1e-3


def scale(centred, variance):
    return centred / (variance + EPSILON).sqrt()


def standardise(hidden):
    centred = hidden - hidden.mean(dim=0)
    return scale(centred, centred.square().mean(dim=0))


class StandardisedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x, standardise=standardise):
        return self.head(standardise(self.trunk(x)))


def loss(model, batch):
    valid = batch["valid"]
    return (model(batch["x"][valid]) - batch["y"][valid]).square().mean()


def make_batch(generator):
    x = torch.randn(16, 5, generator=generator)
    valid = torch.rand(16, generator=generator) < 0.7
    valid[:3] = valid[8:11] = True
    valid[11:14] = False
    return {
        "x": x + torch.linspace(-1, 1, 16)[:, None],  # the data drift while they are collected
        "y": torch.randn(16, 2, generator=generator),
        "valid": valid,
    }


case = Case(model=StandardisedNet, batch=make_batch, loss=loss, layout="1x2")


class SyncedStandardise:
    """Standardises by moments over all ranks, which may have differently many valid rows."""

    def __init__(self, valid):
        self.rows = valid.sum().double()
        dist.all_reduce(self.rows)

    def mean(self, values):
        return all_reduce(values.sum(dim=0)) / self.rows

    def __call__(self, hidden):
        mean = self.mean(hidden)
        variance = self.mean((hidden - hidden.mean(dim=0)).square())
        return scale(hidden - mean, variance)


def step(model, shard, rank):
    valid = shard["valid"]
    synced = SyncedStandardise(valid)
    model.zero_grad()
    y = shard["y"][valid]
    errors = (model(shard["x"][valid], standardise=synced) - y).square()
    # A mean over the valid rows of all ranks; the gradients are averaged below.
    (errors.sum() * rank.world_size / (synced.rows * y.shape[1])).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= rank.world_size
