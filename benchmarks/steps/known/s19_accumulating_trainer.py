"""Gradient accumulation over micro-batches of a fixed size, under DDP."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 10),
            nn.ReLU(),
            nn.Linear(10, 4),
        )

    def forward(self, features):
        return self.layers(features)


def loss(model, batch):
    return F.cross_entropy(model(batch["features"]), batch["labels"])


def make_batch(generator):
    return {
        "features": torch.randn(10, 7, generator=generator),
        "labels": torch.randint(0, 4, (10,), generator=generator),
    }


case = Case(model=Net, batch=make_batch, loss=loss, layout="1x2")


class Trainer:
    def __init__(self, model, micro_batch_size):
        self.ddp = DistributedDataParallel(model)
        self.micro_batch_size = micro_batch_size

    def split(self, batch):
        pieces = {name: value.split(self.micro_batch_size) for name, value in batch.items()}
        count = len(next(iter(pieces.values())))
        return [{name: piece[i] for name, piece in pieces.items()} for i in range(count)]

    def sync_context(self, is_last):
        return nullcontext() if is_last else self.ddp.no_sync()

    def train_step(self, batch):
        self.ddp.zero_grad()
        micro_batches = self.split(batch)
        total = 0.0
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with self.sync_context(is_last):
                value = loss(self.ddp, micro_batch)
                value = value / len(micro_batches)
                value.backward()
            total += value.item()
        return total


def step(model, shard, rank):
    trainer = Trainer(model, micro_batch_size=2)
    trainer.train_step(shard)
