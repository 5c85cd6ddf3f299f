"""Accumulates the gradients of several micro-batches before the ranks exchange them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 3))

    def forward(self, x):
        return self.layers(x)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).abs().mean()


def make_batch(generator):
    return {
        "x": torch.randn(12, 5, generator=generator),
        "y": 2 * torch.randn(12, 3, generator=generator),
    }


case = Case(model=Regressor, batch=make_batch, loss=loss, layout="1x2")


@dataclass
class Settings:
    micro_batches: int = 4


class AccumulatingTrainer:
    """Runs a large shard in pieces which fit into memory."""

    def __init__(self, model, settings):
        self.model = model
        self.settings = settings

    def pieces(self, shard):
        columns = {name: rows.chunk(self.settings.micro_batches) for name, rows in shard.items()}
        names = list(columns)
        return [dict(zip(names, rows, strict=True)) for rows in zip(*columns.values(), strict=True)]

    def backward(self, shard):
        pieces = self.pieces(shard)
        for piece in pieces:
            value = loss(self.model, piece)
            # Every piece is a mean over equally many rows.
            (value / self.settings.micro_batches).backward()

    def synchronise(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def step(model, shard, rank):
    trainer = AccumulatingTrainer(model, Settings())
    model.zero_grad()
    trainer.backward(shard)
    trainer.synchronise()
