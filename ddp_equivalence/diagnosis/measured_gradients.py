"""The gradients that the ranks were measured to hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.parameter_elements import ParameterElements
from ddp_equivalence.diagnosis.residual import nearly_equal

WORST_CONDITION = 1e8
"""The condition number beyond which gradients are too alike to be told apart."""


@dataclass(frozen=True)
class MeasuredGradients:
    """What every reporting rank holds after the step.

    ``by_rank``: shape (reporting ranks, elements); it is empty before anything was measured.
    ``differing``: the parameters that are beyond their limits or differ between ranks.
    ``expected``: the gradient of the big batch.
    """

    by_rank: Tensor
    differing: frozenset[str]
    expected: Tensor
    parameters: ParameterElements

    @property
    def is_known(self) -> bool:
        """False before anything was measured."""
        return self.by_rank.numel() > 0

    @property
    def is_finite(self) -> bool:
        return bool(self.by_rank.isfinite().all())

    @cached_property
    def ranks_differ(self) -> bool:
        """True if the ranks hold different gradients, beyond rounding."""
        return not nearly_equal(self.by_rank, self.by_rank.mean(0).expand_as(self.by_rank))

    @property
    def only_some_parameters_differ(self) -> bool:
        return 0 < len(self.differing) < len(self.parameters.names)

    @cached_property
    def factor(self) -> float | None:
        """The number k for which k times the big batch is nearest to what the ranks hold."""
        square = float(self.expected @ self.expected)
        if not square or not self.is_finite:
            return None
        return float((self.by_rank @ self.expected).mean()) / square

    def weights_of(self, gradients: Tensor) -> Tensor | None:
        """The weight of each of these gradients in what each rank holds, by least squares.

        ``gradients``: shape (gradients, elements). Returns shape (reporting ranks, gradients), or
        None where the gradients cannot be told apart.
        """
        if not bool(gradients.isfinite().all()):
            return None
        if gradients.shape[0] > gradients.shape[1] or not self.is_finite:
            return None
        singular = torch.linalg.svdvals(gradients)
        if float(singular[-1]) * WORST_CONDITION < float(singular[0]):
            return None
        solution: Tensor = torch.linalg.lstsq(gradients.T, self.by_rank.T).solution
        return solution.T
