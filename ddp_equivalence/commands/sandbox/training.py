"""The toy problem: its settings and noise, its training, and its closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist, fmean, pvariance
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.ranks import Rank
from ddp_equivalence.ranks.warm_ranks import on_ranks

SAMPLES = 256
"""The number of samples in an epoch, as published."""

LARGEST_LR = 1e6
"""The largest learning rate that is accepted: far more than any that trains, and its square is
finite."""

FEWEST_EXPERIMENTS, MOST_EXPERIMENTS = 10, 100_000
"""The number of experiments with noise. The variance over fewer says nothing, and the noise of all
is drawn at once."""


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
        if SAMPLES % self.ranks:
            right = f"a number of ranks that divides the {SAMPLES} samples of an epoch"
            raise BadCase("ranks", self.ranks, right)
        if SAMPLES % self.effective_batch:
            right = f"a divisor of {SAMPLES // self.ranks}, so that all batches are full"
            raise BadCase("batch_size", self.batch_size, right)
        fewest = 1 if self.deterministic else FEWEST_EXPERIMENTS
        if not fewest <= self.n_experiments <= MOST_EXPERIMENTS:
            right = f"a number from {fewest} to {MOST_EXPERIMENTS:,}"
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


def batches(problem: Problem, rank: int = 0) -> Iterator[dict[str, Tensor]]:
    """The inputs and targets of every step of one rank, shape (batch_size, experiments), float64.

    The ranks take consecutive shares of each effective batch. Together they see the examples that
    one process with a batch of that size sees.
    """
    shape = (2, SAMPLES, problem.n_experiments)
    for epoch in range(problem.n_epochs):
        examples = np.zeros(shape)
        if not problem.deterministic:
            examples = np.random.default_rng((problem.seed, epoch)).standard_normal(shape)
        inputs, targets = torch.from_numpy(examples)
        for start in range(rank * problem.batch_size, SAMPLES, problem.effective_batch):
            rows = slice(start, start + problem.batch_size)
            yield {"inputs": 1 + inputs[rows], "targets": targets[rows]}


class Neurons(nn.Module):
    """Independent neurons ``y = w x``, one for each experiment, whose w is 1 at the start."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs and outputs of shape (batch, count)."""
        return self.weight * inputs


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The L1 loss of each neuron, a mean over its batch, summed over the neurons.

    The loss of a neuron depends on no other weight, so each neuron gets the gradient that it would
    get alone.
    """
    return F.l1_loss(model(batch["inputs"]), batch["targets"], reduction="none").mean(0).sum()


# Train on one process or on ranks, with one loop.

DEADLINE, DEADLINE_A_STEP = 120.0, 1.0
"""The seconds that the ranks get: a fixed number, and more for each step."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TrainingResult:
    """The weights at the end, shape (ranks, experiments), and the update steps that rank 0 saw,
    shape (steps, experiments).
    """

    weights: Array
    steps: Array

    @cached_property
    def w(self) -> float:
        """The mean over the experiments of the weight that rank 0 holds at the end."""
        return float(self.weights[0].mean())

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of rank 0's weight at the end, over the experiments."""
        off = self.weights[0] - self.weights[0, 0]  # exactly 0 where all are equal
        return float(off.std(ddof=1)) if len(off) > 1 else 0.0

    @cached_property
    def variance(self) -> float:
        """The variance of all update steps of all experiments about their common mean."""
        off = self.steps - self.steps[0, 0]  # exactly 0 where all are equal
        return float(off.var(ddof=1)) if off.size > 1 else 0.0

    @property
    def path(self) -> Array:
        """The mean weight before the first step and after each, shape (steps + 1,)."""
        return 1.0 + np.concatenate([[0.0], np.cumsum(self.steps.mean(1))])

    @property
    def spreads(self) -> Array:
        """For each experiment, the largest weight of any rank less the smallest."""
        differences: Array = np.ptp(self.weights, axis=0)
        return differences


def train(problem: Problem, as_published: bool = False) -> TrainingResult:
    """Run all experiments: in this process if the problem has one rank, else on real ranks (gloo).

    ``as_published``: make the mistake of the published script, which makes a DDP wrapper but calls
    the bare net. Raises RankFailed or RanksTimedOut.
    """
    if problem.ranks == 1:
        results = [trained(None, problem)]
    else:
        layout, deadline = f"1x{problem.ranks}", DEADLINE + DEADLINE_A_STEP * problem.steps
        results = list(on_ranks(layout, trained, problem, as_published, deadline=deadline))
    return TrainingResult(np.stack([weights for weights, _ in results]), results[0][1])


def trained(rank: Rank | None, problem: Problem, as_published: bool = False) -> tuple[Array, Array]:
    """Train one rank's share, or in one process without a wrapper if ``rank`` is None.

    Returns the weights at the end, shape (experiments,), and on the first rank the update steps,
    shape (steps, experiments).
    """
    neurons = Neurons(problem.n_experiments)
    wrapper = neurons if rank is None else DistributedDataParallel(neurons)
    called = neurons if as_published else wrapper
    optimizer = torch.optim.SGD(neurons.parameters(), lr=problem.lr)
    gradients = []
    for batch in batches(problem, rank.rank if rank else 0):
        optimizer.zero_grad()
        loss(called, batch).backward()
        assert neurons.weight.grad is not None
        gradients.append(neurons.weight.grad.clone())
        if as_published:  # the published script takes the average only to print it
            dist.all_reduce(gradients[-1])
            gradients[-1] /= problem.ranks
        optimizer.step()
    steps = -problem.lr * torch.stack(gradients).numpy()
    return neurons.weight.detach().numpy(), steps if rank is None or rank.rank == 0 else steps[:0]


# The closed form: mean and variance of the update steps, and the weight that they lead to.


@dataclass(frozen=True)
class ClosedForm:
    """The figures that a problem must give: the mean weight before the first step and after each,
    the standard deviation of the weight at the end, and the variance of all update steps, pooled.
    """

    path: tuple[float, ...]
    deviation: float
    variance: float

    @property
    def w(self) -> float:
        return self.path[-1]


def gradient(w: float) -> tuple[float, float]:
    """The mean of the gradient of one noisy sample at weight ``w``, and its derivative by w.

    The gradient is ``sign(u) x`` with ``x = 1 + N(0, 1)``, ``y = N(0, 1)`` and ``u = w x - y``.
    Given x, ``E sign(u) = 2 Phi(w x) - 1``. Stein's identity ``E (x - 1) f(x) = E f'(x)`` then
    gives the mean. The variance is 2 - mean^2, because the square of the gradient is that of x.
    """
    s = math.sqrt(1 + w * w)  # the standard deviation of u, whose mean is w
    a = w / s
    density = NormalDist().pdf(a)
    mean = 2 * NormalDist().cdf(a) - 1 + 2 * a * density
    return mean, density * (4 - 2 * a * a) / s**3


LARGEST_DEVIATION = 0.03
"""The closed form neglects what the weight's own deviation, up to this one, does to its mean."""


def closed_form(problem: Problem) -> ClosedForm:
    """Follow mean and variance of the weight over the steps.

    A step subtracts lr times the mean of B gradients from the weight. Given w, that has mean
    ``lr m(w)`` and variance ``lr^2 (2 - m(w)^2) / B``. The weight's own variance V adds
    ``lr^2 m'^2 V`` to the variance of a step. What it adds to the mean is neglected.
    """
    lr, path, spread, variances = problem.lr, [1.0], 0.0, []
    for _ in range(problem.steps):
        w = path[-1]
        mean, slope = gradient(w)
        of_samples = (2 - mean**2) / problem.effective_batch
        if problem.deterministic:
            mean, slope, of_samples = float((w > 0) - (w < 0)), 0.0, 0.0
        path.append(w - lr * mean)
        variances.append(lr**2 * (of_samples + slope**2 * spread))
        spread = spread * (1 - lr * slope) ** 2 + lr**2 * of_samples
    updates = problem.steps * problem.n_experiments
    between = pvariance([after - before for before, after in pairwise(path)])
    variance = (fmean(variances) + between) * updates / max(1, updates - problem.deterministic)
    return ClosedForm(tuple(path), math.sqrt(spread), variance)


# The mistake of the published script, as a case and a step that the suite can name.

NEURONS = 199
"""The number of weights. There are more weights than examples, so that the shares of the examples
can be told apart. It is a prime, so that no other count in the report equals it."""


def case_of(problem: Problem) -> Case:
    """The first step of the sandbox, always with noise.

    Without noise all ranks get the same examples, and nothing shows whether they reduce.
    """
    whole = Problem(
        lr=problem.lr,
        batch_size=problem.effective_batch,
        n_experiments=NEURONS,
        seed=problem.seed,
    )
    return Case(
        model=lambda: Neurons(NEURONS),
        batch=lambda generator: next(batches(whole)),
        loss=loss,
        layout=f"1x{problem.ranks}",
        seed=problem.seed,
    )


def as_published(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Wraps the net in DDP but calls the bare net, so that no gradient is ever reduced."""
    ddp = DistributedDataParallel(model)
    loss(model, shard).backward()
    del ddp
