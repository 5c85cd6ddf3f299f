"""Gradients are accumulated over a window of micro-batches before the ranks synchronise."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ACCUMULATION_STEPS = 2
MICRO_BATCH = 2


class ResidualMLP(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = x + F.gelu(self.first(x))
        x = x + F.gelu(self.second(x))
        return self.head(x).squeeze(1)


def loss(model, batch):
    x, y = batch
    return F.binary_cross_entropy_with_logits(model(x), y)


def make_batch(generator):
    x = torch.randn(12, 6, generator=generator)
    y = (x.sum(1) + torch.randn(12, generator=generator) > 0).double()
    return x, y


case = Case(model=ResidualMLP, batch=make_batch, loss=loss, layout="2x1")


def micro_batches(batch):
    return list(zip(*(part.split(MICRO_BATCH) for part in batch), strict=True))


def backward(ddp, micro_batch, examples):
    """Add the micro-batch's part of the mean over all examples of this rank."""
    share = len(micro_batch[0]) / examples
    value = share * loss(ddp, micro_batch)
    value.backward()
    return value.detach()


def train_one_batch(ddp, batch):
    ddp.zero_grad()
    running = torch.zeros((), device=batch[0].device)
    for i, micro_batch in enumerate(micro_batches(batch)):
        synchronise = (i + 1) % ACCUMULATION_STEPS == 0
        if synchronise:
            running += backward(ddp, micro_batch, len(batch[0]))
        else:
            with ddp.no_sync():
                running += backward(ddp, micro_batch, len(batch[0]))
    return running


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    train_one_batch(ddp, shard)
