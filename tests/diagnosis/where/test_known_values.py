"""Values of the loss of the case are recognised in other arrangements, and other values are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ddp_equivalence.diagnosis.where.relations import KnownValues
from ddp_equivalence.measurement.calls import Value

Change = Callable[[Tensor], Tensor]

SCORES = torch.randn(12, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TOKENS = torch.randint(0, 20, (12, 9), generator=torch.Generator().manual_seed(2))
MASK = (torch.arange(8) < torch.arange(1, 9)[:, None]).double()
SINGLE = torch.tensor(0.75, dtype=torch.float64)


def known(tensor: Tensor, change: Change, multiples: tuple[float, ...] = ()) -> str:
    values = KnownValues([Value.of(tensor)], multiples, 2.3e-16)
    return values.has(Value.of(change(tensor)))


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        (SCORES, lambda one: one * 3),
        (SCORES, lambda one: -one),
        (SCORES, lambda one: one * (1 + 1e-12)),
        (SCORES, lambda one: one.transpose(1, 2)),
        (SCORES, lambda one: one.reshape(60, 7)),
        (SCORES, lambda one: one[[4, 0, 7]]),
        (SCORES, lambda one: one[3]),
        (SCORES, lambda one: one[:, 1:4]),
        (SCORES, lambda one: one[..., :-1]),
        (SCORES, lambda one: torch.cat([one, torch.ones(3, 5, 7)])),
        (TOKENS, lambda one: one[[3, 1]]),
        (MASK, lambda one: one[[3, 1]]),
        (MASK, lambda one: one[:, 2:5]),
        (SINGLE, lambda one: one.reshape(1)),
    ],
)
def test_the_value_in_another_arrangement_is_known(tensor: Tensor, change: Change) -> None:
    assert known(tensor, change) == "yes"


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        (SCORES, lambda one: one + 1e-3),
        (SCORES, lambda one: one * torch.linspace(1, 1.01, 12)[:, None, None]),
        (SCORES, lambda one: one.roll(1, 2) + one),
        (SCORES, lambda one: one[[4, 0]].cumsum(2)),
        (TOKENS, lambda one: one.roll(1, 1)),
        (MASK, lambda one: torch.cat([torch.zeros(8, 1), one[:, :-1]], 1)),
        (SINGLE, lambda one: one * 2),
    ],
)
def test_another_value_is_not_known(tensor: Tensor, change: Change) -> None:
    assert known(tensor, change) == "no"


@pytest.mark.parametrize("tensor", [torch.ones(4, 3), torch.full((5,), torch.nan), torch.empty(0)])
def test_nothing_is_said_of_constants_and_of_what_is_not_finite(tensor: Tensor) -> None:
    assert known(tensor, lambda one: one) == "unknown"


def test_a_number_is_known_as_a_multiple_by_a_count() -> None:
    assert known(SINGLE, lambda one: one * 12, multiples=(12.0,)) == "yes"
