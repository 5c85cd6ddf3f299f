"""Examples known by their number, read on every rank by torch's own sampler and loader. float64."""

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
    """Example 7 is 7."""

    def __init__(self, examples: int) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, number: int) -> int:
        return number


@dataclass(frozen=True)
class Reading:
    """How a process reads the data. ``batch_size``: of each process, as a DataLoader has it.

    ``sampler``: a DistributedSampler deals the examples; without it every process shuffles all of
    them, by ``own_seed`` or all alike. ``..._drops``: the ``drop_last`` of either.
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
"""By step, the numbers of the examples that one process read."""


def read(rank: Rank, how: Reading) -> list[Epoch]:
    """What this rank reads, by epoch and step."""
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
    """What a rank read in one step, and the gradient it held after DDP's backward, (18,)."""

    numbers: list[int]
    gradient: Tensor


def train(rank: Rank, how: Reading) -> list[Step]:
    """The steps of the first epoch, all at the same weights."""
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
    """The same in every process: a model, rows (examples, 5) and targets (examples, 3)."""
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
    """Of these examples as one big batch, one process, no wrapper; a number twice counts twice."""
    model, rows, targets = task(examples)
    chosen = list(numbers)
    mse(model, rows[chosen], targets[chosen]).backward()
    return flat_gradient(model)


def together(by_rank: Sequence[Epoch], step: int) -> list[int]:
    """What all ranks read in this step."""
    return [number for epoch in by_rank for number in epoch[step]]


def all_of(by_rank: Sequence[Epoch]) -> list[int]:
    """What all ranks read in the epoch, in rising order."""
    return sorted(number for epoch in by_rank for step in epoch for number in step)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding: 1e-12 of the largest element."""
    return bool((one - other).abs().max() <= 1e-12 * other.abs().max())


def apart(one: Tensor, other: Tensor) -> float:
    """How far apart, relative to the other."""
    return float((one - other).norm() / other.norm())
