"""Keyword spotting: a convolution over filterbank frames, with gradient accumulation under DDP."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

BANDS, FRAMES, KEYWORDS = 6, 12, 4
STEPS, MICRO = 2, 2


class Spotter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(BANDS, 8, kernel_size=3, padding=1)
        self.back = nn.Conv1d(8, 8, kernel_size=3, dilation=2, padding=2)
        self.head = nn.Linear(8, KEYWORDS)

    def forward(self, frames: Tensor) -> Tensor:
        hidden = torch.tanh(self.front(frames))
        hidden = hidden + torch.tanh(self.back(hidden))
        return self.head(hidden.mean(-1))


def utterances(generator: torch.Generator) -> dict[str, Tensor]:
    rows = 16 * STEPS
    return {
        "frames": torch.randn(rows, BANDS, FRAMES, generator=generator),
        "keyword": torch.randint(0, KEYWORDS, (rows,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["frames"]), batch["keyword"], label_smoothing=0.1)


def micro_batches(batch: dict[str, Tensor], count: int):
    parts = {name: value.chunk(count) for name, value in batch.items()}
    for number in range(count):
        yield {name: value[number] for name, value in parts.items()}


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3)


class Accumulator:
    """Runs a DDP model over micro-batches and leaves one optimizer step behind."""

    def __init__(self, ddp: DistributedDataParallel, every: int) -> None:
        self.ddp = ddp
        self.every = every
        self.seen = 0

    def context(self):
        """Gradients travel with the micro-batch that completes a step, the others stay at home."""
        synchronises = self.seen % self.every == 0
        self.seen += 1
        return nullcontext() if synchronises else self.ddp.no_sync()

    def backward(self, batch: dict[str, Tensor]) -> None:
        with self.context():
            (loss(self.ddp, batch) / self.every).backward()


def step(model: nn.Module, rank):
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(ddp.parameters())
    accumulator = Accumulator(ddp, MICRO)

    def train(batch: dict[str, Tensor]) -> None:
        for micro in micro_batches(batch, MICRO):
            accumulator.backward(micro)
        optimizer.step()
        optimizer.zero_grad()

    return train


case = Case(model=Spotter, batch=utterances, loss=loss, layout="1x2")
options = {"compare": "update", "steps": STEPS, "optimizer": make_optimizer}
