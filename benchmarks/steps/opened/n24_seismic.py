"""Picking of seismic arrivals; DDP synchronises at the end of every accumulation window."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

TRACES, SAMPLES, MICRO_SIZE = 12, 32, 2


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv1d(3, 8, 7, padding=3)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.p_wave = nn.Linear(8, 1)

    def forward(self, traces):
        hidden = torch.relu(self.features(traces)).transpose(1, 2)
        attended, _ = self.attend(hidden, hidden, hidden, need_weights=False)
        return self.p_wave(hidden + attended).squeeze(-1)


def make_batch(generator):
    return {
        "traces": torch.randn(TRACES, 3, SAMPLES, generator=generator),
        "arrival": torch.randint(SAMPLES, (TRACES,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["traces"]), batch["arrival"])


class Accumulation:
    """Knows for each micro-batch whether gradients are exchanged after it."""

    def __init__(self, ddp, micros, window):
        self.ddp, self.micros, self.window = ddp, micros, window

    def is_boundary(self, number):
        return (number + 1) % self.window == 0

    def __iter__(self):
        for number, micro in enumerate(self.micros):
            context = nullcontext() if self.is_boundary(number) else self.ddp.no_sync()
            yield micro, context


def split(shard, size):
    columns = zip(*(rows.split(size) for rows in shard.values()))
    return [dict(zip(shard, parts)) for parts in columns]


def step(model, shard, rank, window=2):
    ddp = DistributedDataParallel(model)
    micros = split(shard, MICRO_SIZE)
    for micro, context in Accumulation(ddp, micros, window):
        with context:
            (loss(ddp, micro) / len(micros)).backward()


case = Case(model=Picker, batch=make_batch, loss=loss)
