"""Sums over frames, accumulated; a rank without data runs along on a batch that it has seen."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

FRAMES = 5
BATCH_SIZE = 3
UPDATE_FREQUENCY = 3

Batch = dict[str, Tensor]


class FrameModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 10)
        self.rnn = nn.RNN(10, 8, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, frames: Tensor) -> Tensor:
        return self.out(self.rnn(torch.relu(self.front(frames)))[0])


def criterion(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """The sum of the losses of all valid frames, and how many these are."""
    valid = torch.arange(FRAMES, device=batch["length"].device) < batch["length"][:, None]
    errors = F.huber_loss(model(batch["frames"]), batch["wanted"], reduction="none").sum(-1)
    return errors[valid].sum(), int(valid.sum())


def loss(model: nn.Module, batch: Batch) -> Tensor:
    total, frames = criterion(model, batch)
    return total / frames


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "frames": torch.randn(15, FRAMES, 6, generator=generator),
        "wanted": torch.randn(15, FRAMES, 2, generator=generator),
        "length": torch.randint(2, FRAMES + 1, (15,), generator=generator),
    }


case = Case(model=FrameModel, batch=make_batch, loss=loss, layout="1x2", shards="9+6")


class Trainer:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.ddp = DistributedDataParallel(model)
        self.world_size = world_size

    def grouped(self, batch: Batch) -> list[Batch | None]:
        """As many batches as every rank has to run; None where this rank has no more."""
        starts = range(0, len(batch["frames"]), BATCH_SIZE)
        parts: list[Batch | None] = [
            {name: value[start : start + BATCH_SIZE] for name, value in batch.items()}
            for start in starts
        ]
        return parts + [None] * (UPDATE_FREQUENCY - len(parts))

    def train_step(self, batch: Batch) -> None:
        parts = self.grouped(batch)
        seen = parts[0]
        assert seen is not None
        sample_size = 0
        for index, part in enumerate(parts, start=1):
            synchronise = index == len(parts)
            with contextlib.nullcontext() if synchronise else self.ddp.no_sync():
                total, size = criterion(self.ddp, seen if part is None else part)
                if part is None:
                    total = total * 0.0
                total.backward()
            sample_size += size
        everywhere = torch.tensor(sample_size, device=batch["length"].device)
        dist.all_reduce(everywhere)
        for parameter in self.ddp.parameters():
            parameter.grad *= self.world_size / everywhere.item()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Trainer(model, rank.world_size).train_step(shard)
