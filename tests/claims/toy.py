"""One neuron y = w x, many independent ones at a time: every experiment has its own w and noise.

w begins at ``begin``; the targets are 0 and the inputs 1, plus ``noise`` times independent standard
normal numbers on every input and target. The loss is the mean of |w x - y|, or of half the square
of w x - y. float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ddp_equivalence import Rank
from ddp_equivalence.ranks.on_ranks import on_ranks


@dataclass(frozen=True)
class Toy:
    """What is trained, for one epoch. ``batch_size``: of each process."""

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
    """``weight`` after the epoch: mean over the experiments, and its variance; of ``steps`` update
    steps the variance of all, as the mean over the steps of the variance over experiments.
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
    """A mean over the batch; experiments are added up, so that they stay independent."""
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
    inputs, targets = (all_of[first::stride] for all_of in data_of(toy))
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
    """Plain: no wrapper, no group."""
    neurons = Neurons(toy.experiments, toy.begin)
    return trained(neurons, neurons, toy, first=0, stride=1)


def of_a_rank(rank: Rank, toy: Toy) -> Course:
    """DistributedDataParallel as it comes."""
    neurons = Neurons(toy.experiments, toy.begin)
    ddp = DistributedDataParallel(neurons)
    course = trained(ddp, neurons, toy, first=rank.rank, stride=rank.world_size)
    del ddp
    return course


def four_processes(toy: Toy) -> Course:
    """Of four ranks under DDP: all must have taken the same course."""
    courses: tuple[Course, ...] = on_ranks("2x2", of_a_rank, toy)
    assert len(set(courses)) == 1
    return courses[0]
