"""Ranks with unequally many batches under DDP's join: one rank has a batch more than the other."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PER_RANK = 4
LR = 0.1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 10)
        self.fc2 = nn.Linear(10, 3)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


def batch(generator):
    """Three loader batches of four: two for the first step, one that is left for the second."""
    return {
        "x": torch.randn(3 * PER_RANK, 6, generator=generator),
        "y": torch.randn(3 * PER_RANK, 3, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def loader(data, rank):
    """Deals batches to the ranks in turn, as an iterable dataset does, and drops none."""
    pieces = [t.split(PER_RANK) for t in data.values()]
    batches = [dict(zip(data, values)) for values in zip(*pieces)]
    return batches[rank.rank :: rank.world_size]


def fit(ddp, batches, optimizer):
    with ddp.join():
        for data in batches:
            optimizer.zero_grad()
            loss(ddp, data).backward()
            optimizer.step()


def step(model, data, rank):
    ddp = DDP(model)
    fit(ddp, loader(data, rank), make_optimizer(ddp.parameters()))


case = Case(model=Net, batch=batch, loss=loss, layout="1x2", shards="own")
options = {
    "compare": "update",
    "optimizer": make_optimizer,
    "steps": (2 * PER_RANK, PER_RANK),
}
