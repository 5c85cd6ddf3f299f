"""The nine published rows, with the digits that were printed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

from ddp_equivalence.commands.sandbox.problem import Problem

SOURCE = "published sandbox"
RANKS = 8


@dataclass(frozen=True)
class PublishedRow:
    """One published run: ``w`` after an epoch and the ``variance`` of the steps, as printed."""

    mode: str
    problem: Problem
    w: str
    variance: str

    @property
    def rounding(self) -> float:
        """Half a unit of the last printed digit of w."""
        return 0.5 * 10.0 ** -len(self.w.partition(".")[2])

    @property
    def spread(self) -> float:
        """The standard deviation of the published w, relative to that of ranks that reduce.

        The published script never reduced, so each of its w is that of rank 0, which saw an eighth
        of the examples.
        """
        return sqrt(self.problem.ranks)

    def seeded(self, seed: int) -> PublishedRow:
        """The same row with the noise of another seed."""
        return replace(self, problem=replace(self.problem, seed=seed))


def _row(mode: str, lr: float, batch: int, experiments: int, w: str, variance: str) -> PublishedRow:
    problem = Problem(
        lr=lr,
        batch_size=batch,
        ranks=RANKS if mode == "multi" else 1,
        deterministic=experiments == 1,
        n_experiments=experiments,
    )
    return PublishedRow(mode, problem, w, variance)


ROWS = (
    _row("single", 1e-3, 128, 1, "0.9980", "0"),
    _row("multi", 1e-3, 16, 1, "0.9980", "0"),
    _row("single", 1e-3, 128, 10_000, "0.9981", "8.3733e-09"),
    _row("multi", 1e-3, 16, 10_000, "0.9981", "8.4037e-09"),
    _row("single", 1e-3, 16, 1, "0.9840", "0"),
    _row("multi", 8e-3, 16, 1, "0.9840", "0"),
    _row("single", 1e-3, 16, 1_000, "0.9847", "6.7332e-08"),
    _row("multi", 8e-3, 16, 1_000, "0.9848", "5.5736e-07"),
    _row("multi", 2.8284e-3, 16, 1_000, "0.9946", "6.5220e-08"),
)
"""The rows in their published order. Rows with one experiment have no noise."""
