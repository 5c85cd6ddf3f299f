"""Patch classifier with accumulation over an epoch whose length is no multiple of the window.

Here an "epoch" is one optimizer step; the window only bounds how long ranks go without talking.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

WINDOW = 4
MICRO = 1


class Patches(nn.Module):
    def __init__(self, size=4, dim=16, classes=6):
        super().__init__()
        self.embed = nn.Conv2d(1, dim, size, stride=size)
        self.attend = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.out = nn.Linear(dim, classes)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        mixed, _ = self.attend(x, x, x, need_weights=False)
        return self.out((x + mixed).mean(1))


def batch(generator):
    return {
        "images": torch.randn(24, 1, 8, 8, generator=generator),
        "classes": torch.randint(6, (24,), generator=generator),
    }


def loss(model, data):
    return F.cross_entropy(model(data["images"]), data["classes"], label_smoothing=0.05)


case = Case(model=Patches, batch=batch, loss=loss, layout="2x2")


def split(data, rows):
    columns = [value.split(rows) for value in data.values()]
    return [dict(zip(data, parts)) for parts in zip(*columns)]


class Accumulator:
    def __init__(self, ddp, window, total):
        self.ddp, self.window, self.total = ddp, window, total
        self.done = 0

    @property
    def communicates(self):
        return (self.done + 1) % self.window == 0

    def backward(self, data):
        if self.communicates:
            self._backward(data)
        else:
            with self.ddp.no_sync():
                self._backward(data)
        self.done += 1

    def _backward(self, data):
        (loss(self.ddp, data) / self.total).backward()


def step(model, shard, rank):
    ddp = DDP(model)
    micros = split(shard, MICRO)
    accumulator = Accumulator(ddp, WINDOW, len(micros))
    for micro in micros:
        accumulator.backward(micro)
