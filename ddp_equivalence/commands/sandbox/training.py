"""Train blocks of experiments, in this process or on ranks."""

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
from ddp_equivalence.commands.sandbox.problem import Problem, batches
from ddp_equivalence.commands.sandbox.training_result import BlockResult, TrainingResult, joined
from ddp_equivalence.ranks import Rank
from ddp_equivalence.ranks.on_ranks import on_ranks

DEADLINE, DEADLINE_A_STEP = 60.0, 0.1
"""The seconds that the ranks get for a block: a fixed number, and a number for each step."""

Progress = Callable[[int, int], None]
"""Is called with the number of finished blocks and the number of all blocks."""


@dataclass(frozen=True)
class Block:
    """What every rank is told to train.

    ``as_published``: make the mistake of the published script, which makes a DDP wrapper but calls
    the bare net.
    """

    problem: Problem
    experiments: range
    as_published: bool = False


def train(
    problem: Problem, as_published: bool = False, progress: Progress = lambda done, of: None
) -> TrainingResult:
    """Run all experiments: in this process if the problem has one rank, on real ranks (gloo) if it
    has more.

    Raises RankFailed or RanksTimedOut.
    """
    results = []
    for done, experiments in enumerate(problem.blocks, start=1):
        if problem.ranks == 1:
            results.append({0: single(problem, experiments)})
        else:
            results.append(multi(Block(problem, experiments, as_published)))
        progress(done, len(problem.blocks))
    return joined(results)


def single(problem: Problem, experiments: range) -> BlockResult:
    """Train in one process, without a wrapper."""
    neurons = Neurons(len(experiments))
    optimizer = torch.optim.SGD(neurons.parameters(), lr=problem.lr)
    gradients = []
    for inputs, targets in batches(problem, experiments):
        optimizer.zero_grad()
        loss(neurons(inputs), targets).backward()
        gradients.append(_gradient(neurons).clone())
        optimizer.step()
    return _result(neurons, gradients, problem.lr)


def multi(
    block: Block, on_each_rank: Callable[[Rank, Block], BlockResult] | None = None
) -> dict[int, BlockResult]:
    """Train on ranks; the results are returned by rank. Raises RankFailed or RanksTimedOut.

    ``on_each_rank``: the function that every rank calls, if it is not ``on_rank``.
    """
    problem = block.problem
    deadline = DEADLINE + DEADLINE_A_STEP * problem.steps
    results = on_ranks(f"1x{problem.ranks}", on_each_rank or on_rank, block, deadline=deadline)
    return dict(enumerate(results))


def on_rank(rank: Rank, block: Block) -> BlockResult:
    """Train one rank's share."""
    problem = block.problem
    neurons = Neurons(len(block.experiments))
    ddp = DistributedDataParallel(neurons)
    called = neurons if block.as_published else ddp
    optimizer = torch.optim.SGD(neurons.parameters(), lr=problem.lr)
    gradients = []
    for inputs, targets in batches(problem, block.experiments, rank.rank):
        optimizer.zero_grad()
        loss(called(inputs), targets).backward()
        gradient = _gradient(neurons)
        gradients.append(_averaged(gradient) if block.as_published else gradient.clone())
        optimizer.step()
    return _result(neurons, gradients, problem.lr)


def _averaged(gradient: Tensor) -> Tensor:
    """The average over the ranks, which the published script takes only to print it.

    The step that follows uses the rank's own gradient.
    """
    gathered = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, gradient)
    return torch.stack(gathered).mean(0)


def _gradient(neurons: Neurons) -> Tensor:
    assert neurons.weight.grad is not None
    return neurons.weight.grad


def _result(neurons: Neurons, gradients: list[Tensor], lr: float) -> BlockResult:
    steps: NDArray[np.float64] = -lr * torch.stack(gradients).numpy()
    # The variance is taken of differences from the first experiment's step. It is then exactly 0 if
    # all steps are equal.
    off = steps - steps[:, :1]
    means = off.mean(1)
    return BlockResult(
        weights=neurons.weight.detach().numpy(),
        step_means=steps[:, 0] + means,
        step_squares=((off - means[:, None]) ** 2).sum(1),
    )
