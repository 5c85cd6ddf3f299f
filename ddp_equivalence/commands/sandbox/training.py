"""The toy problem: trains blocks of experiments, and its closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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

# Train blocks of experiments, in this process or on ranks.

DEADLINE, DEADLINE_A_STEP = 60.0, 0.1
"""The seconds that the ranks get for a block: a fixed number, and more for each step."""

Progress = Callable[[int, int], None]
"""A function that is called with the number of finished blocks and the number of all blocks."""


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


# What training gave: weights by rank and experiment, and the moments of the update steps.

Array = NDArray[np.float64]


@dataclass(frozen=True)
class BlockResult:
    """What one rank has after training one block of experiments.

    ``weights``: the weights at the end, shape (experiments,). ``step_means``: the mean of each
    update step over the experiments; ``step_squares``: the sum of the squared distances from that
    mean; both of shape (steps,).
    """

    weights: Array
    step_means: Array
    step_squares: Array


@dataclass(frozen=True)
class TrainingResult:
    """All experiments of a run.

    ``weights``: shape (ranks, experiments). The other fields are as in ``BlockResult``.
    """

    weights: Array
    step_means: Array
    step_squares: Array

    @property
    def experiments(self) -> int:
        return len(self.weights[0])

    @property
    def updates(self) -> int:
        """The number of update steps of all experiments together."""
        return self.experiments * len(self.step_means)

    @cached_property
    def w(self) -> float:
        """The mean over the experiments of the weight that rank 0 holds at the end."""
        return float(self.weights[0, 0] + self._from_first.mean())

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of rank 0's weight at the end, over the experiments."""
        return float(self._from_first.std(ddof=1)) if self.experiments > 1 else 0.0

    @property
    def _from_first(self) -> Array:
        """The weights of rank 0 at the end, less its weight in the first experiment.

        The differences of equal weights are then exactly 0, without rounding.
        """
        differences: Array = self.weights[0] - self.weights[0, 0]
        return differences

    @cached_property
    def variance(self) -> float:
        """The variance of all update steps of all experiments about their common mean."""
        off = self.step_means - self.step_means[0]
        between = self.experiments * ((off - off.mean()) ** 2).sum()
        return float((self.step_squares.sum() + between) / max(1, self.updates - 1))

    @cached_property
    def path(self) -> Array:
        """The mean weight before the first step and after each, shape (steps + 1,)."""
        return 1.0 + np.concatenate([[0.0], np.cumsum(self.step_means)])

    @property
    def spreads(self) -> Array:
        """For each experiment, the largest weight of any rank less the smallest."""
        differences: Array = np.ptp(self.weights, axis=0)
        return differences

    @property
    def spread(self) -> float:
        """The largest of ``spreads``; 0 if all ranks hold the same bits."""
        return float(self.spreads.max())


def joined(blocks: Sequence[Mapping[int, BlockResult]]) -> TrainingResult:
    """Join the blocks of a run. Each block maps a rank to its result; the moments of the steps are
    those of rank 0.

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample
    variances, 1979.
    """
    first = blocks[0][0]
    means, squares, count = first.step_means, first.step_squares, len(first.weights)
    for block in blocks[1:]:
        more = len(block[0].weights)
        apart = block[0].step_means - means
        squares = squares + block[0].step_squares + apart**2 * (count * more / (count + more))
        means = means + apart * (more / (count + more))
        count += more
    weights = [np.concatenate([block[rank].weights for block in blocks]) for rank in blocks[0]]
    return TrainingResult(np.stack(weights), means, squares)


# Many independent neurons ``y = w x`` in one model; each neuron is one experiment.


class Neurons(nn.Module):
    """``count`` neurons with one float64 weight each, which is 1 at the start."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs and outputs of shape (batch, count)."""
        return self.weight * inputs


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The L1 loss of each neuron, a mean over its batch, summed over the neurons.

    The loss of a neuron depends on no other weight, so each neuron gets the gradient that it would
    get alone.
    """
    return F.l1_loss(outputs, targets, reduction="none").mean(0).sum()


# The toy problem: its settings, and the examples that every experiment sees.

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


# The closed form: mean and variance of the update steps, and the weight that they lead to.
#
# The gradient of one sample is ``g = sign(u) x`` with ``x = 1 + N(0, 1)``, ``y = N(0, 1)`` and
# ``u = w x - y``. Given x, ``E sign(u) = 2 Phi(w x) - 1 =: h(x)``, so ``E sign(u) x^k = E x^k
# h(x)``. Stein's identity ``E (x - 1) f(x) = E f'(x)`` reduces k step by step to 0. All of this
# is exact for a given w.

NORMAL = NormalDist()


@dataclass(frozen=True)
class ClosedForm:
    """The figures that a problem must give.

    ``path``: the mean weight before the first step and after each. ``deviation``: the standard
    deviation of the weight at the end. ``variance``: the variance of all update steps, pooled.
    ``kurtosis``: the kurtosis of an update step, in excess of the normal distribution's.
    ``curvature``: how far the second-order terms have moved the mean weight; the neglected
    third-order terms are smaller. ``carried``: the largest share that the weight's own spread has
    in the variance of any step.
    """

    path: tuple[float, ...]
    deviation: float
    variance: float
    kurtosis: float
    curvature: float
    carried: float = 0.0

    @property
    def w(self) -> float:
        return self.path[-1]


@dataclass(frozen=True)
class GradientMoments:
    """Moments of the gradient of one noisy sample at a weight w.

    ``mean`` is the mean; ``slope`` and ``bend`` are its first and second derivative by w.
    ``variance`` is 2 - mean^2, because ``g^2 = x^2``. ``kurtosis`` is in excess of the normal
    distribution's.
    """

    mean: float
    slope: float
    bend: float
    variance: float
    kurtosis: float


def gradient(w: float) -> GradientMoments:
    """The moments of the gradient of one sample at weight ``w``."""
    s = math.sqrt(1 + w * w)  # the standard deviation of u, whose mean is w
    a = w / s
    density = NORMAL.pdf(a)
    of_sign = 2 * NORMAL.cdf(a) - 1
    # E x^k h'(x) = 2 a density E z^k, where z is normal with mean and variance 1 / (1 + w^2):
    z = 1 / (1 + w * w)
    j0, j1, j2 = (2 * a * density * moment for moment in (1.0, z, z * z + z))
    mean = of_sign + j0
    second = mean + of_sign + j1  # E sign(u) x^2
    third = second + 2 * mean + j2
    variance = 2 - mean**2
    fourth = 10 - 4 * mean * third + 12 * mean**2 - 3 * mean**4  # E x^4 = 10, E x^2 = 2
    return GradientMoments(
        mean=mean,
        slope=density * (4 - 2 * a * a) / s**3,
        bend=-density * a * (8 - 2 * a * a) / s**6 - 3 * a * density * (4 - 2 * a * a) / s**4,
        variance=variance,
        kurtosis=fourth / variance**2 - 3,
    )


@lru_cache(maxsize=64)
def closed_form(problem: Problem) -> ClosedForm:
    """Follow mean and variance of the weight over the steps.

    A step subtracts lr times the mean of B gradients from the weight. Given w, that has mean
    ``lr m(w)`` and variance ``lr^2 (2 - m(w)^2) / B``. The weight's own variance V enters to second
    order: ``E m(w) = m + m'' V / 2`` and ``Var m(w) = m'^2 V``. Terms of third order are neglected.
    """
    return _without_noise(problem) if problem.deterministic else _with_noise(problem)


def _without_noise(problem: Problem) -> ClosedForm:
    path, steps = [1.0], []
    for _ in range(problem.steps):
        steps.append(-problem.lr * ((path[-1] > 0) - (path[-1] < 0)))
        path.append(path[-1] + steps[-1])
    of_all = len(steps) * problem.n_experiments
    pooled = pvariance(steps) * of_all / max(1, of_all - 1)
    return ClosedForm(tuple(path), 0.0, pooled, 0.0, 0.0)


def _with_noise(problem: Problem) -> ClosedForm:
    lr, batch = problem.lr, problem.effective_batch
    path, spread, first_order = [1.0], 0.0, 1.0
    means, within, carried = [], [], 0.0
    for _ in range(problem.steps):
        here = gradient(path[-1])
        mean = here.mean + here.bend * spread / 2
        of_mean = here.slope**2 * spread  # the part that comes from the spread of the weight
        of_samples = (2 - here.mean**2 - of_mean - here.mean * here.bend * spread) / batch
        means.append(-lr * mean)
        within.append(lr**2 * (of_samples + of_mean))
        carried = max(carried, of_mean / (of_mean + of_samples))
        path.append(path[-1] - lr * mean)
        first_order -= lr * gradient(first_order).mean
        spread = spread * (1 - lr * here.slope) ** 2 + lr**2 * of_samples
    return ClosedForm(
        path=tuple(path),
        deviation=math.sqrt(max(0.0, spread)),
        variance=fmean(within) + pvariance(means),
        kurtosis=gradient(1.0).kurtosis / batch,
        curvature=abs(path[-1] - first_order),
        carried=carried,
    )


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

    def neurons() -> nn.Module:
        return Neurons(NEURONS)

    def first_batch(generator: torch.Generator) -> dict[str, Tensor]:
        inputs, targets = next(batches(whole, range(NEURONS)))
        return {"inputs": inputs, "targets": targets}

    return Case(
        model=neurons,
        batch=first_batch,
        loss=l1_loss,
        layout=f"1x{problem.ranks}",
        seed=problem.seed,
    )


def l1_loss(model: nn.Module, batch: Any) -> Tensor:
    """The sandbox's loss of a model on a batch."""
    return loss(model(batch["inputs"]), batch["targets"])


def as_published(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Wraps the net in DDP but calls the bare net, so that no gradient is ever reduced."""
    ddp = DistributedDataParallel(model)
    l1_loss(model, shard).backward()
    del ddp


def mended(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Wraps the net in DDP and calls the wrapper."""
    ddp = DistributedDataParallel(model)
    l1_loss(ddp, shard).backward()
