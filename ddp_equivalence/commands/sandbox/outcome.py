"""What training left: weights by rank and experiment, and the moments of the update steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trained:
    """What one rank has of one block.

    ``weights``: at the end, shape (experiments,). ``step_means``, ``step_squares``: of the update
    steps over the experiments, the mean and the sum of squared distances from it, shape (steps,).
    """

    weights: Array
    step_means: Array
    step_squares: Array


@dataclass(frozen=True)
class Outcome:
    """All experiments of a run. ``weights``: shape (ranks, experiments); steps as in Trained."""

    weights: Array
    step_means: Array
    step_squares: Array

    @property
    def experiments(self) -> int:
        return len(self.weights[0])

    @property
    def updates(self) -> int:
        """Update steps of all experiments together."""
        return self.experiments * len(self.step_means)

    @cached_property
    def w(self) -> float:
        """The mean over the experiments of the weight that rank 0 holds at the end."""
        return float(self.weights[0, 0] + self._apart.mean())

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of that weight over the experiments."""
        return float(self._apart.std(ddof=1)) if self.experiments > 1 else 0.0

    @property
    def _apart(self) -> Array:
        """From the first experiment: equal weights then lie apart by nothing, not by rounding."""
        found: Array = self.weights[0] - self.weights[0, 0]
        return found

    @cached_property
    def variance(self) -> float:
        """Of all update steps of all experiments, about the one mean of them all."""
        off = self.step_means - self.step_means[0]
        between = self.experiments * ((off - off.mean()) ** 2).sum()
        return float((self.step_squares.sum() + between) / max(1, self.updates - 1))

    @cached_property
    def path(self) -> Array:
        """The mean weight before the first step and after each, shape (steps + 1,)."""
        return 1.0 + np.concatenate([[0.0], np.cumsum(self.step_means)])

    @property
    def spreads(self) -> Array:
        """By experiment, the largest weight of any rank less the smallest."""
        found: Array = np.ptp(self.weights, axis=0)
        return found

    @property
    def spread(self) -> float:
        """The largest of them; 0 where all ranks hold the same bits."""
        return float(self.spreads.max())


def joined(blocks: Sequence[Mapping[int, Trained]]) -> Outcome:
    """The blocks of a run as one, by rank; the steps are those that rank 0 saw.

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
    return Outcome(np.stack(weights), means, squares)
