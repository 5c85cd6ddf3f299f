"""Many independent neurons y = w x at a time: every experiment has its own w and its own noise.

w begins at ``begin``. The inputs are 1 and the targets 0, plus ``noise`` times independent standard
normal numbers. The loss is the mean of |w x - y|, or of half the square of w x - y. All in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ddp_equivalence import Rank
from ddp_equivalence.ranks.warm_ranks import on_ranks


@dataclass(frozen=True)
class Toy:
    """The settings of one epoch. ``batch_size`` is that of each process."""

    batch_size: int
    lr: float
    noise: float = 0.0
    experiments: int = 1
    examples: int = 256
    begin: float = 1.0
    squared: bool = False
    optimizer: Callable[..., Optimizer] = SGD

    def optimize(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self.optimizer(parameters, lr=self.lr)


@dataclass(frozen=True)
class Course:
    """The course of one epoch.

    ``weight`` and ``variance_of_weight``: mean and variance over the experiments of the weight
    after the epoch. ``variance_of_steps``: the variance of an update step over the experiments,
    averaged over all ``steps``.
    """

    steps: int
    weight: float
    variance_of_weight: float
    variance_of_steps: float


class Neurons(nn.Module):
    """Inputs (batch, experiments) -> outputs of the same shape."""

    def __init__(self, experiments: int, begin: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((experiments,), begin, dtype=torch.double))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, squared: bool) -> Tensor:
    """The mean over the batch, summed over the experiments, so that these stay independent."""
    error = model(inputs) - targets
    each: Tensor = error.square() / 2 if squared else error.abs()
    return each.mean(dim=0).sum()


def data_of(toy: Toy) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (examples, experiments)."""
    generator = torch.Generator().manual_seed(3)
    shape = toy.examples, toy.experiments
    if not toy.noise:
        return torch.ones(shape, dtype=torch.double), torch.zeros(shape, dtype=torch.double)
    inputs, targets = torch.randn(2, *shape, generator=generator, dtype=torch.double) * toy.noise
    return inputs + 1, targets


def trained(model: nn.Module, neurons: Neurons, toy: Toy, first: int, stride: int) -> Course:
    """One epoch over the examples first, first + stride, ... of all."""
    inputs, targets = (data[first::stride] for data in data_of(toy))
    optimizer = toy.optimize(neurons.parameters())
    weights = [neurons.weight.detach().clone()]
    for begin in range(0, len(inputs), toy.batch_size):
        mine = slice(begin, begin + toy.batch_size)
        optimizer.zero_grad()
        loss_of(model, inputs[mine], targets[mine], toy.squared).backward()
        optimizer.step()
        weights.append(neurons.weight.detach().clone())
    steps = torch.stack(weights).diff(dim=0)
    return Course(
        steps=len(steps),
        weight=float(weights[-1].mean()),
        variance_of_weight=float(weights[-1].var(correction=0)),
        variance_of_steps=float(steps.var(dim=1, correction=0).mean()),
    )


def one_process(toy: Toy) -> Course:
    """The epoch in one process, without wrapper or process group."""
    neurons = Neurons(toy.experiments, toy.begin)
    return trained(neurons, neurons, toy, first=0, stride=1)


def on_a_rank(rank: Rank, toy: Toy) -> Course:
    """The epoch on one rank under DistributedDataParallel."""
    neurons = Neurons(toy.experiments, toy.begin)
    ddp = DistributedDataParallel(neurons)
    course = trained(ddp, neurons, toy, first=rank.rank, stride=rank.world_size)
    del ddp
    return course


def four_processes(toy: Toy) -> Course:
    """The epoch on four ranks under DDP, which must all take the same course."""
    courses: tuple[Course, ...] = on_ranks("2x2", on_a_rank, toy)
    assert len(set(courses)) == 1
    return courses[0]
