"""Pretraining on packed code: the reader knows how many samples are consumed, and can go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

TOKENS, LENGTH, GLOBAL_BATCH, STEPS = 24, 7, 8, 4


@dataclass
class Progress:
    consumed: int = 0
    iteration: int = 0


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 10)
        self.mix = nn.Linear(10, 10)
        self.head = nn.Linear(10, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def corpus(generator: torch.Generator) -> Tensor:
    return torch.randint(0, TOKENS, (GLOBAL_BATCH * STEPS, LENGTH), generator=generator)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Reader:
    """Deals the corpus in order, from the first sample that has not been consumed."""

    def __init__(self, samples: int, consumed: int, rank: int, world: int) -> None:
        self.samples, self.consumed = samples, consumed
        self.size = GLOBAL_BATCH // world
        self.start = rank * self.size

    def __iter__(self) -> Iterator[list[int]]:
        waiting: list[int] = []
        for number in range(self.consumed, self.samples):
            waiting.append(number)
            if len(waiting) == GLOBAL_BATCH:
                yield waiting[self.start : self.start + self.size]
                waiting = []


class Run:
    def __init__(self, model: nn.Module, rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.optimizer = make_optimizer(model.parameters())
        self.rank = rank
        self.progress = Progress()

    def train(self, tokens: Tensor, until: int) -> dict[str, int]:
        progress = self.progress
        reader = Reader(len(tokens), progress.consumed, self.rank.rank, self.rank.world_size)
        for rows in reader:
            self.optimizer.zero_grad()
            loss(self.ddp, tokens[rows]).backward()
            self.optimizer.step()
            progress.iteration += 1
            progress.consumed += len(rows)
            if progress.iteration == until:
                break
        return asdict(progress)

    def resume(self, saved: dict[str, int]) -> None:
        self.progress = Progress(**saved)


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.6)


def step(model: nn.Module, tokens: Tensor, rank) -> None:
    run = Run(model, rank)
    saved = run.train(tokens, until=STEPS // 2)
    run.resume(saved)
    run.train(tokens, until=STEPS)


case = Case(model=Bigrams, batch=corpus, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "steps": STEPS, "optimizer": make_optimizer}
