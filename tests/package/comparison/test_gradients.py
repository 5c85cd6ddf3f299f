"""Digests tell any change of a bit, whatever the size of the tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ddp_equivalence.comparison.gradients import BLOCK, CONDENSED_FROM, digest

SMALL, LARGE = CONDENSED_FROM // 8 - 1, CONDENSED_FROM // 2 + BLOCK // 2 + 3
"""Elements: hashed as they are, and condensed first but for a tail."""


def a_bit(values: Tensor) -> None:
    values.view(torch.uint8)[-1] ^= 1


def signs_of_two(values: Tensor) -> None:
    values[:2] *= -1


def all_signs(values: Tensor) -> None:
    values *= -1


def two_swapped(values: Tensor) -> None:
    values[:2] = values[:2].flip(0).clone()


def two_blocks_swapped(values: Tensor) -> None:
    both = values[:BLOCK].view(2, -1)
    both.copy_(both.flip(0).clone())


def one_zero_negated(values: Tensor) -> None:
    values[1] = 0.0


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change", [a_bit, signs_of_two, all_signs, two_swapped, two_blocks_swapped, one_zero_negated]
)
def test_other_bits_give_another_digest(
    change: Callable[[Tensor], None], dtype: torch.dtype, count: int
) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[1] = -0.0
    changed = values.clone()
    change(changed)
    assert digest({"": values.clone()}) == digest({"": values})
    assert digest({"": changed}) != digest({"": values})


def test_other_names_and_an_absent_tensor_give_another_digest() -> None:
    values = torch.ones(3)
    assert digest({"a": values}) != digest({"b": values}) != digest({"b": None})
