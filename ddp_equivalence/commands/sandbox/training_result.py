"""What training gave: weights by rank and experiment, and the moments of the update steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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
