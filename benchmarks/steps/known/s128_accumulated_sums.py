"""Sums of losses are accumulated over micro-batches, and divided by the examples of all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

Batch = tuple[Tensor, Tensor]


class Counter(nn.Module):
    """Predicts how often an event happens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 9)
        self.rate = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.rate(x + torch.tanh(self.second(x))).squeeze(-1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.poisson_nll_loss(model(batch[0]), batch[1])


def make_batch(generator: torch.Generator) -> Batch:
    events = torch.poisson(torch.full((16,), 2.0), generator=generator)
    return torch.randn(16, 6, generator=generator), events


case = Case(model=Counter, batch=make_batch, loss=loss, layout="1x2")


def micro_batches(shard: Batch, size: int) -> Iterator[Batch]:
    yield from zip(*(rows.split(size) for rows in shard), strict=True)


def examples_of_all(shard: Batch) -> int:
    examples = torch.tensor([len(shard[1])], device=shard[1].device)
    dist.all_reduce(examples)
    return int(examples)


def add_up_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@contextmanager
def cleared(model: nn.Module) -> Iterator[None]:
    model.zero_grad()
    yield
    assert all(parameter.grad is not None for parameter in model.parameters())


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    examples = examples_of_all(shard)
    with cleared(model):
        for inputs, events in micro_batches(shard, size=4):
            summed = F.poisson_nll_loss(model(inputs), events, reduction="sum")
            (summed / examples).backward()
            add_up_gradients(model)
