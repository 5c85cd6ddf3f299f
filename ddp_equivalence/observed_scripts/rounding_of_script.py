"""How far rounding alone moves the gradient that the script computes in one process."""

from __future__ import annotations

import torch

from ddp_equivalence.comparison.expected import Expected
from ddp_equivalence.comparison.noise import larger_noise, noise_of, relative_noise
from ddp_equivalence.comparison.rounding import OF_ORDER, Rounding
from ddp_equivalence.observed_scripts.as_case import Kind, ObservedStep
from ddp_equivalence.observed_scripts.running_script import CannotReplay
from ddp_equivalence.reference import Reference

LARGEST = 0.02
"""Another order of the rows that moves the gradient by more than this is no rounding: the loss
depends on the order."""

LARGEST_IN_FLOAT64 = 1e-4
"""The same for a script of which every part computes in float64."""

EPS_OF_FLOAT32 = torch.finfo(torch.float32).eps


class ExpectedOfScript(Expected):
    """The script's own gradient of all rows, and its rounding: it is asked for the rows in other
    orders, with weights that are moved by one eps. ``kind``: as in ``as_case``.
    """

    def __init__(self, reference: Reference, step: ObservedStep, kind: Kind) -> None:
        super().__init__(reference)
        self._step, self._kind = step, kind

    def rounding_under(self, autocast: torch.dtype | None) -> Rounding:
        """With the ranks in reverse order, and without random numbers each rank's rows too."""
        if autocast not in self._rounding:
            self._rounding[autocast] = self._measured(self._orders()[:2], autocast)
        return self._rounding[autocast]

    def rounding_of_more_runs(self, autocast: torch.dtype | None = None) -> Rounding:
        """In further orders."""
        if autocast not in self._of_more_runs:
            self._of_more_runs[autocast] = self._measured(self._orders(), autocast)
        return self._of_more_runs[autocast]

    def _orders(self) -> list[tuple[int, ...]]:
        by_rank = self._step.rows_by_rank
        ranks = len(by_rank)
        other_ranks = [
            tuple(row for rank in range(ranks) for row in by_rank[(first - rank) % ranks])
            for first in range(ranks - 1, -1, -1)
        ]
        orders = [order for order in other_ranks if order != self._step.everything]
        steps = [self._step.record.step(rank, self._step.number) for rank in range(ranks)]
        if not any(step.draws for step in steps):
            orders.insert(1, tuple(row for rows in by_rank for row in rows[::-1]))
            orders.insert(0, self._step.everything[::-1])
        return orders

    def _measured(
        self, orders: list[tuple[int, ...]], autocast: torch.dtype | None = None
    ) -> Rounding:
        truth = self.reference.expected
        dtypes = [self.reference.lowest_dtype, *([] if autocast is None else [autocast])]
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        noise: dict[tuple[int, str], object] = {}
        order_matters = False
        for nudge, order in enumerate(orders, start=1):
            try:
                answer = self._step.answer(order, nudge)
            except CannotReplay:
                continue
            found = {
                (0, self._step.short(name)): None if one is None else one.double()
                for name, one in answer.gradients(self._kind).items()
            }
            of_order = noise_of(truth, found)
            inside = torch.finfo(getattr(torch, answer.lowest)).eps if answer.lowest else 0.0
            in_float64 = max(eps, inside) < EPS_OF_FLOAT32
            largest = LARGEST_IN_FLOAT64 if in_float64 else max(LARGEST, OF_ORDER * eps)
            if relative_noise(truth, of_order) > largest:
                order_matters = True
                continue
            noise = larger_noise(noise, of_order) if noise else of_order  # type: ignore[arg-type,assignment]
        return Rounding(noise, order_matters)  # type: ignore[arg-type]
