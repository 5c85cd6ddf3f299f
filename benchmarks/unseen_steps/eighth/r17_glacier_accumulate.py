"""Glacier thickness from radar: gradients are accumulated over micro-batches, and exchanged with the last one."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

TRACES, SAMPLES = 24, 18
MICRO_BATCHES = 3


class RadarNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(1, 4, kernel_size=5, stride=2)
        self.thickness = nn.Linear(4 * 7, 1)

    def forward(self, traces):
        echoes = F.silu(self.filters(traces.unsqueeze(1)))
        return self.thickness(echoes.flatten(1)).squeeze(-1)


def make_batch(generator):
    return {
        "traces": torch.randn(TRACES, SAMPLES, generator=generator),
        "metres": torch.rand(TRACES, generator=generator) * 5,
    }


def loss(model, batch):
    return F.smooth_l1_loss(model(batch["traces"]), batch["metres"])


def micro_batches(batch, count):
    pieces = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [{name: pieces[name][i] for name in pieces} for i in range(count)]


class Accumulator:
    """Keeps the interconnect quiet until the last micro-batch."""

    def __init__(self, model, count):
        self.ddp = DistributedDataParallel(model)
        self.count = count

    def objective(self, piece):
        return loss(self.ddp, piece) / self.count

    def __call__(self, batch):
        *early, last = micro_batches(batch, self.count)
        with self.ddp.no_sync():
            for piece in early:
                self.objective(piece).backward()
            final = self.objective(last)
        # this one talks to the other ranks
        final.backward()


def step(model, shard, rank):
    Accumulator(model, MICRO_BATCHES)(shard)


case = Case(model=RadarNet, batch=make_batch, loss=loss, layout="1x2")
