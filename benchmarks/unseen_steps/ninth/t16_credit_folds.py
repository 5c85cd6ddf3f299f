"""Credit default on tabular data; the folds of a shard are scored one by one to save memory."""

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

LOANS, COLUMNS, FOLDS = 24, 7, 3


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + F.relu(self.inner(self.norm(x)))


class Tabular(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Linear(COLUMNS, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(2))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def loans(generator):
    return {
        "columns": torch.randn(LOANS, COLUMNS, generator=generator),
        "default": torch.randint(0, 2, (LOANS,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["columns"]), batch["default"], label_smoothing=0.05)


def folds(shard):
    columns, default = shard["columns"].chunk(FOLDS), shard["default"].chunk(FOLDS)
    return [{"columns": c, "default": d} for c, d in zip(columns, default)]


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    score = functools.partial(loss, ddp)
    # several forwards, one backward: there is nothing to exchange before that
    with ddp.no_sync():
        scores = [score(fold) for fold in folds(shard)]
    torch.stack(scores).mean().backward()


case = Case(model=Tabular, batch=loans, loss=loss, layout="1x2")
