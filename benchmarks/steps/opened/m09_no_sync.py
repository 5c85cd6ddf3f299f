"""Keyword spotting: accumulation without communication until it is needed."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ACCUMULATE = 3


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv1d(5, 8, 3)
        self.pool = nn.AdaptiveMaxPool1d(1)
        self.keywords = nn.Linear(8, 6)

    def forward(self, spectrogram):
        return self.keywords(self.pool(F.gelu(self.features(spectrogram))).squeeze(-1))


def clips(generator):
    return {
        "spectrogram": torch.randn(12, 5, 14, generator=generator),
        "keyword": torch.randint(6, (12,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["spectrogram"]), batch["keyword"])


def split(batch, parts):
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: chunks[name][part] for name in chunks} for part in range(parts)]


def communication(ddp, index):
    """All micro-batches but one are accumulated on the rank."""
    return ddp.no_sync() if index % ACCUMULATE else nullcontext()


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=False)
    ddp.zero_grad()
    for index, micro in enumerate(split(shard, ACCUMULATE)):
        with communication(ddp, index):
            objective = loss(ddp, micro) / ACCUMULATE
            objective.backward()


case = Case(model=Spotter, batch=clips, loss=loss)
