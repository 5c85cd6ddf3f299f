"""Numbered examples that torch's own sampler and loader read on every rank; in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_equivalence import Rank
from tests.claims.setting import flat_gradient, mse


class Numbers(Dataset[int]):
    """A dataset whose example 7 is the number 7."""

    def __init__(self, examples: int) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, number: int) -> int:
        return number


@dataclass(frozen=True)
class Reading:
    """How a process reads the data.

    ``batch_size``: that of each process's DataLoader. ``sampler``: a DistributedSampler deals the
    examples out. Without it every process shuffles all of them, with a seed of its own if
    ``own_seed``. ``sampler_drops`` and ``loader_drops``: the ``drop_last`` of each.
    """

    examples: int
    batch_size: int
    epochs: int = 1
    sampler: bool = True
    own_seed: bool = False
    set_epoch: bool = True
    sampler_drops: bool = False
    loader_drops: bool = False


Epoch = list[list[int]]
"""For each step the numbers of the examples that one process read."""


def read(rank: Rank, how: Reading) -> list[Epoch]:
    """The numbers that this rank reads, by epoch and step."""
    data = Numbers(how.examples)
    sampler: DistributedSampler[int] | None = None
    if how.sampler:
        sampler = DistributedSampler(data, shuffle=True, seed=0, drop_last=how.sampler_drops)
    loader = DataLoader(
        data,
        batch_size=how.batch_size,
        sampler=sampler,
        shuffle=None if how.sampler else True,
        drop_last=how.loader_drops,
        generator=torch.Generator().manual_seed(rank.rank if how.own_seed else 0),
    )
    epochs = []
    for epoch in range(how.epochs):
        if sampler is not None and how.set_epoch:
            sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    return epochs


@dataclass(frozen=True)
class Step:
    """The numbers that a rank read in one step, and its gradient after DDP's backward, (18,)."""

    numbers: list[int]
    gradient: Tensor


def train(rank: Rank, how: Reading) -> list[Step]:
    """The steps of the first epoch, all with the same weights."""
    model, rows, targets = task(how.examples)
    ddp = DistributedDataParallel(model)
    steps = []
    for numbers in read(rank, how)[0]:
        model.zero_grad()
        mse(ddp, rows[numbers], targets[numbers]).backward()
        steps.append(Step(numbers, flat_gradient(model)))
    del ddp
    return steps


def task(examples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, rows (examples, 5) and targets (examples, 3), the same in every process."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.double)

    model = nn.Linear(5, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(normal(*parameter.shape))
    rows = normal(examples, 5)
    return model, rows, rows[:, :3] + normal(examples, 3)


def gradient_of(numbers: Sequence[int], examples: int) -> Tensor:
    """The gradient of these examples in one big batch: one process, no wrapper.

    An example whose number is given twice counts twice.
    """
    model, rows, targets = task(examples)
    chosen = list(numbers)
    mse(model, rows[chosen], targets[chosen]).backward()
    return flat_gradient(model)


def together(by_rank: Sequence[Epoch], step: int) -> list[int]:
    """The numbers that all ranks read in this step."""
    return [number for epoch in by_rank for number in epoch[step]]


def all_of(by_rank: Sequence[Epoch]) -> list[int]:
    """The numbers that all ranks read in the epoch, in rising order."""
    return sorted(number for epoch in by_rank for step in epoch for number in step)


def same(gradient: Tensor, expected: Tensor) -> bool:
    """Whether they are equal except for rounding: 1e-12 of the largest element."""
    return bool((gradient - expected).abs().max() <= 1e-12 * expected.abs().max())


def apart(gradient: Tensor, expected: Tensor) -> float:
    """The distance relative to the size of the expected gradient."""
    return float((gradient - expected).norm() / expected.norm())
