"""Anomaly scores for windows of a sensor stream; every rank reads the stream and takes its windows."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case

WINDOWS, LENGTH, CHANNELS = 16, 10, 2


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(CHANNELS, 6, 3, padding=1), nn.GELU(), nn.Conv1d(6, 6, 3, padding=2, dilation=2)
        )
        self.score = nn.Linear(6, 1)

    def forward(self, window):
        return self.score(self.features(window).mean(-1)).squeeze(-1)


def stream(generator):
    return {
        "window": torch.randn(WINDOWS, CHANNELS, LENGTH, generator=generator),
        "anomaly": torch.randint(0, 2, (WINDOWS,), generator=generator).double(),
    }


def loss(model, batch):
    return nn.functional.binary_cross_entropy_with_logits(model(batch["window"]), batch["anomaly"])


class Windows(Dataset):
    def __init__(self, stream):
        self.stream = stream

    def __len__(self):
        return len(self.stream["window"])

    def __getitem__(self, number):
        return {key: value[number] for key, value in self.stream.items()}


class Strided(Sampler):
    """Windows offset, offset + stride, offset + 2 stride, ..."""

    def __init__(self, length, offset, stride):
        self.numbers = range(offset, length, stride)

    def __len__(self):
        return len(self.numbers)

    def __iter__(self):
        return iter(self.numbers)


def step(model, batch, rank):
    windows = Windows(batch)
    sampler = Strided(len(windows), offset=rank.local_rank, stride=rank.world_size)
    loader = DataLoader(windows, batch_size=len(sampler), sampler=sampler)
    ddp = DistributedDataParallel(model)
    for mine in loader:
        loss(ddp, mine).backward()


case = Case(model=Scorer, batch=stream, loss=loss, layout="2x2", shards="own")
