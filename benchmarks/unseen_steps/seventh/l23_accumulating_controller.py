"""Captions of remote sensing tiles, trained with accumulation through a small controller."""

import contextlib
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass
class Accumulation:
    every: int
    seen: int = 0
    log: list = field(default_factory=list)

    @property
    def boundary(self):
        return self.seen % self.every == 0

    @contextlib.contextmanager
    def micro_step(self, ddp):
        context = contextlib.nullcontext() if self.boundary else ddp.no_sync()
        with context:
            yield 1.0 / self.every
        self.seen += 1
        self.log.append(self.boundary)


class Captioner(nn.Module):
    def __init__(self, words=9):
        super().__init__()
        self.see = nn.Linear(12, 6)
        self.say = nn.Linear(6, words)
        self.words = nn.Embedding(words, 6)

    def forward(self, tiles, previous):
        return self.say(torch.relu(self.see(tiles)) * self.words(previous))


def tiles(generator):
    return {
        "tiles": torch.randn(16, 12, generator=generator),
        "previous": torch.randint(0, 9, (16,), generator=generator),
        "word": torch.randint(0, 9, (16,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["tiles"], batch["previous"]), batch["word"])


class Loop:
    def __init__(self, model, every):
        self.ddp = DistributedDataParallel(model)
        self.accumulation = Accumulation(every)

    def run(self, shard):
        pieces = {key: value.chunk(self.accumulation.every) for key, value in shard.items()}
        for i in range(self.accumulation.every):
            micro = {key: value[i] for key, value in pieces.items()}
            with self.accumulation.micro_step(self.ddp) as share:
                (share * loss(self.ddp, micro)).backward()


def step(model, shard, rank):
    Loop(model, every=4).run(shard)


case = Case(model=Captioner, batch=tiles, loss=loss, layout="1x2")
