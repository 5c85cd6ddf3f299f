"""Train a block of experiments, in this process or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.commands.sandbox.neurons import Neurons, loss
from ddp_equivalence.commands.sandbox.outcome import Outcome, Trained, joined
from ddp_equivalence.commands.sandbox.problem import Setup, batches
from ddp_equivalence.ranks import Rank
from ddp_equivalence.ranks.on_ranks import on_ranks

DEADLINE, DEADLINE_A_STEP = 60.0, 0.1
"""Seconds that a block gets, and more of them for each step."""

Progress = Callable[[int, int], None]
"""Told how many blocks of how many are done."""


@dataclass(frozen=True)
class Work:
    """What every rank is given. ``as_published``: the wrapper is made and never called."""

    setup: Setup
    experiments: range
    as_published: bool = False


def train(
    setup: Setup, as_published: bool = False, progress: Progress = lambda done, of: None
) -> Outcome:
    """Run all experiments: in one process if the setup has one rank, else on real ranks (gloo).

    Raises RankFailed or RanksTimedOut.
    """
    found = []
    for done, experiments in enumerate(setup.blocks, start=1):
        if setup.ranks == 1:
            found.append({0: single(setup, experiments)})
        else:
            found.append(multi(Work(setup, experiments, as_published)))
        progress(done, len(setup.blocks))
    return joined(found)


def single(setup: Setup, experiments: range) -> Trained:
    """One process, one batch, no wrapper."""
    neurons = Neurons(len(experiments))
    optimizer = torch.optim.SGD(neurons.parameters(), lr=setup.lr)
    gradients = []
    for inputs, targets in batches(setup, experiments):
        optimizer.zero_grad()
        loss(neurons(inputs), targets).backward()
        gradients.append(_gradient(neurons).clone())
        optimizer.step()
    return _trained(neurons, gradients, setup.lr)


def multi(work: Work, run: Callable[[Rank, Work], Trained] | None = None) -> dict[int, Trained]:
    """The same on ranks: rank -> what it has trained. Raises RankFailed or RanksTimedOut.

    ``run``: what a rank does, if not ``on_rank``.
    """
    deadline = DEADLINE + DEADLINE_A_STEP * work.setup.steps
    trained = on_ranks(f"1x{work.setup.ranks}", run or on_rank, work, deadline=deadline)
    return dict(enumerate(trained))


def on_rank(rank: Rank, work: Work) -> Trained:
    """What one rank does."""
    setup = work.setup
    neurons = Neurons(len(work.experiments))
    ddp = DistributedDataParallel(neurons)
    called = neurons if work.as_published else ddp
    optimizer = torch.optim.SGD(neurons.parameters(), lr=setup.lr)
    gradients = []
    for inputs, targets in batches(setup, work.experiments, rank.rank):
        optimizer.zero_grad()
        loss(called(inputs), targets).backward()
        gradient = _gradient(neurons)
        gradients.append(_averaged(gradient) if work.as_published else gradient.clone())
        optimizer.step()
    return _trained(neurons, gradients, setup.lr)


def _averaged(gradient: Tensor) -> Tensor:
    """By hand, for the printed figure only: the weights never see it."""
    gathered = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, gradient)
    return torch.stack(gathered).mean(0)


def _gradient(neurons: Neurons) -> Tensor:
    assert neurons.weight.grad is not None
    return neurons.weight.grad


def _trained(neurons: Neurons, gradients: list[Tensor], lr: float) -> Trained:
    steps: NDArray[np.float64] = -lr * torch.stack(gradients).numpy()
    # Off the first experiment's, so that equal steps have a variance of 0 and not of rounding.
    off = steps - steps[:, :1]
    means = off.mean(1)
    return Trained(
        weights=neurons.weight.detach().numpy(),
        step_means=steps[:, 0] + means,
        step_squares=((off - means[:, None]) ** 2).sum(1),
    )
