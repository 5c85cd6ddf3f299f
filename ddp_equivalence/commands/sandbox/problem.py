"""The toy problem: its settings, and the examples that every experiment sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.case.errors import BadCase

SAMPLES = 256
"""The number of samples in an epoch, as published."""

BLOCK_SIZE = 1000
"""The most experiments that are trained side by side. Their noise is drawn at once."""

LARGEST_LR = 1e6
"""The largest learning rate that is accepted: far more than any that trains, and its square is
finite."""

MOST_EXPERIMENTS = 10_000_000
"""The most experiments that are accepted. More would run for hours."""

FEWEST_EXPERIMENTS = 10
"""The fewest experiments with noise. The variance over fewer says nothing."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The settings of one run. ``batch_size`` is per rank; ``ranks`` is 1 for a single process.

    ``deterministic``: every input is 1 and every target 0. Otherwise independent standard normal
    noise is added to both. The noise is drawn anew in each epoch, so that all steps are
    independent.

    Raises BadCase for a field that cannot be right.
    """

    lr: float
    batch_size: int
    ranks: int = 1
    n_epochs: int = 1
    deterministic: bool = False
    n_experiments: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.lr <= LARGEST_LR:
            raise BadCase("lr", self.lr, f"a learning rate above 0, up to {LARGEST_LR:g}")
        for name in ("batch_size", "ranks", "n_epochs", "n_experiments"):
            if getattr(self, name) < 1:
                raise BadCase(name, getattr(self, name), "an integer from 1")
        if self.n_experiments > MOST_EXPERIMENTS:
            raise BadCase("n_experiments", self.n_experiments, f"at most {MOST_EXPERIMENTS:,}")
        if SAMPLES % self.ranks:
            right = f"a number of ranks that divides the {SAMPLES} samples of an epoch"
            raise BadCase("ranks", self.ranks, right)
        if SAMPLES % self.effective_batch:
            of_all = f" over {self.ranks} ranks" if self.ranks > 1 else ""
            sizes = [2**power for power in range(9) if SAMPLES % (2**power * self.ranks) == 0]
            right = f"one of {', '.join(map(str, sizes))}, so that all batches{of_all} are full"
            raise BadCase("batch_size", self.batch_size, right)
        if not self.deterministic and self.n_experiments < FEWEST_EXPERIMENTS:
            right = f"at least {FEWEST_EXPERIMENTS} with noise: fewer show no variance"
            raise BadCase("n_experiments", self.n_experiments, right)
        if not 0 <= self.seed < 2**62:
            raise BadCase("seed", self.seed, "an integer from 0, below 2**62")

    @property
    def effective_batch(self) -> int:
        """The number of examples in one update step, over all ranks."""
        return self.batch_size * self.ranks

    @property
    def steps(self) -> int:
        """The number of update steps of the whole run."""
        return self.n_epochs * SAMPLES // self.effective_batch

    @property
    def blocks(self) -> tuple[range, ...]:
        """The experiments in groups that are trained side by side."""
        starts = range(0, self.n_experiments, BLOCK_SIZE)
        return tuple(range(at, min(at + BLOCK_SIZE, self.n_experiments)) for at in starts)


def batches(problem: Problem, experiments: range, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of every step for one rank, float64, shape (batch_size, experiments).

    The ranks take consecutive shares of each effective batch. Together they see the examples that
    one process with a batch of that size sees. ``experiments`` must lie within one block. The
    examples of an experiment do not depend on which other experiments are trained beside it.
    """
    for epoch in range(problem.n_epochs):
        inputs, targets = _epoch(problem, epoch, experiments)
        for start in range(0, SAMPLES, problem.effective_batch):
            own = start + rank * problem.batch_size
            rows = slice(own, own + problem.batch_size)
            yield inputs[rows], targets[rows]


def _epoch(problem: Problem, epoch: int, experiments: range) -> tuple[Tensor, Tensor]:
    ones = torch.ones(SAMPLES, len(experiments), dtype=torch.float64)
    if problem.deterministic:
        return ones, torch.zeros_like(ones)
    block, first = divmod(experiments.start, BLOCK_SIZE)
    assert experiments.stop <= (block + 1) * BLOCK_SIZE
    noise = torch.from_numpy(_noise(problem.seed, epoch, block))
    noise = noise[..., first : first + len(experiments)]
    return ones + noise[0], noise[1].contiguous()


@lru_cache(maxsize=1)
def _noise(seed: int, epoch: int, block: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The noise of inputs and targets, shape (2, samples, experiments of a block)."""
    generator = np.random.default_rng((seed, epoch, block))
    return generator.standard_normal((2, SAMPLES, BLOCK_SIZE))
