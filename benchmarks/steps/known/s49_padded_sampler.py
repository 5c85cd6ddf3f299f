"""Each rank draws its own rows from the data set, which doesn't divide evenly by the ranks."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

EPOCH = 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)

    def row_losses(self, batch):
        return nn.functional.cross_entropy(self(batch["x"]), batch["y"], reduction="none")


def loss(model, batch):
    return model.row_losses(batch).mean()


def make_batch(generator):
    return {
        "x": torch.randn(14, 6, generator=generator),
        "y": torch.randint(0, 3, (14,), generator=generator),
    }


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x4", shards="own")


class PaddedSampler:
    """Deals shuffled rows to the ranks in turn.

    The first rows are dealt again at the end, so that all ranks get equally many.
    Those repeats have weight nought.
    """

    def __init__(self, rows, rank, seed=0):
        self.rows = rows
        self.rank = rank
        self.seed = seed

    def deal(self, epoch):
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.rows, generator=generator)
        padding = -self.rows % self.rank.world_size
        order = torch.cat([order, order[:padding]])
        positions = torch.arange(self.rank.rank, len(order), self.rank.world_size)
        return order[positions], positions <= self.rows


def step(model, data, rank):
    rows = len(data["x"])
    chosen, real = PaddedSampler(rows, rank).deal(EPOCH)
    batch = {name: column[chosen] for name, column in data.items()}
    model.zero_grad()
    losses = model.row_losses(batch)
    ((losses * real.to(losses.device)).sum() / rows).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
