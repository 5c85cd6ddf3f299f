"""A tensor is recognised whose elements were all picked from gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddp_equivalence.measurement.gradient_changes import parts_of
from ddp_equivalence.ranks.collectives import Issued

GENERATOR = torch.Generator().manual_seed(0)
FIRST = torch.randn(40, 6, generator=GENERATOR, dtype=torch.float64)
SECOND = torch.randn(30, generator=GENERATOR, dtype=torch.float64)
OTHER = torch.randn(30, generator=GENERATOR, dtype=torch.float64)


def found(tensor: Tensor) -> tuple[str, ...]:
    issued = Issued("all_reduce", "SUM", (0, 1, 2), (tensor,), asynchronous=False)
    return parts_of(issued, {"first": FIRST, "second": SECOND})


@pytest.mark.parametrize(
    ("tensor", "names"),
    [
        (FIRST[[3, 7, 11]], ("first",)),
        (FIRST[FIRST > 0.5], ("first",)),
        (FIRST[:, 2] / 3, ("first",)),
        (FIRST[5:9].float(), ("first",)),
        (torch.cat([SECOND[:4], FIRST[0]]), ("first", "second")),
        (torch.cat([SECOND[:9], torch.zeros(5)]), ("second",)),
    ],
)
def test_elements_of_gradients_are_recognised(tensor: Tensor, names: tuple[str, ...]) -> None:
    assert found(tensor) == names


@pytest.mark.parametrize(
    "tensor",
    [
        OTHER,
        2 * FIRST[:3],
        torch.cat([SECOND, OTHER]),
        SECOND[:2],
        torch.zeros(9),
        FIRST.norm(dim=1),
    ],
)
def test_other_tensors_are_not_taken_for_parts_of_gradients(tensor: Tensor) -> None:
    assert not found(tensor)
