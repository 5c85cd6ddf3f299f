"""What ranks may have of a value of one rank, and what they may not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddp_equivalence.diagnosis.where.relations import RELATED, Sharing, related
from ddp_equivalence.measurement.calls import Value

EQUAL = Sharing(((0, 1, 2), (3, 4, 5)), 6)
TURNS = Sharing(((0, 2, 4), (1, 3, 5)), 6)
UNEVEN = Sharing(((0,), (1, 2, 3, 4, 5)), 6)

generator = torch.Generator().manual_seed(3)
ROWS = torch.randn(6, 4, generator=generator, dtype=torch.float64)
TOKENS = torch.randn(18, 2, generator=generator, dtype=torch.float64)
SQUARE = torch.randn(6, 6, generator=generator, dtype=torch.float64)
FLAT = torch.randn(7, generator=generator, dtype=torch.float64)
TERM = torch.randn(4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("sharing", "whole", "parts"),
    [
        (EQUAL, ROWS, [ROWS, ROWS]),
        (EQUAL, ROWS, [2 * ROWS, 2 * ROWS]),
        (EQUAL, ROWS, [ROWS[:3], ROWS[3:]]),
        (TURNS, ROWS, [ROWS[::2], ROWS[1::2]]),
        (UNEVEN, ROWS, [ROWS[:1], ROWS[1:]]),
        (UNEVEN, ROWS, [6 * ROWS[:1], 6 / 5 * ROWS[1:]]),
        (EQUAL, TOKENS, [TOKENS[:9], TOKENS[9:]]),
        (
            EQUAL,
            TOKENS,
            [TOKENS[[0, 1, 2, 6, 7, 8, 12, 13, 14]], TOKENS[[3, 4, 5, 9, 10, 11, 15, 16, 17]]],
        ),
        (EQUAL, SQUARE, [SQUARE[:3], SQUARE[3:]]),
        (EQUAL, SQUARE, [SQUARE[:3, :3], SQUARE[3:, 3:]]),
        (EQUAL, TERM, [0.3 * TERM, 0.7 * TERM]),
        (EQUAL, TERM, [TERM + 1, TERM - 1]),
        (UNEVEN, TERM, [TERM + 5, TERM - 1]),
        (TURNS, ROWS, [ROWS[[0, 2, 4, 1, 3, 5]]] * 2),
        (EQUAL, FLAT, [FLAT[:4], torch.cat([FLAT[4:], torch.zeros(1, dtype=torch.float64)])]),
        (EQUAL, torch.tensor(6), [torch.tensor(2), torch.tensor(4)]),
    ],
)
def test_what_a_right_step_shares_is_related(
    sharing: Sharing, whole: Tensor, parts: list[Tensor]
) -> None:
    assert related([Value.of(part) for part in parts], Value.of(whole), sharing).how in RELATED


@pytest.mark.parametrize(
    ("sharing", "whole", "parts"),
    [
        (EQUAL, ROWS, [ROWS[3:], ROWS[:3]]),
        (EQUAL, ROWS, [ROWS[:3], ROWS[:3]]),
        (EQUAL, TERM, [2 * TERM, 3 * TERM]),
        (EQUAL, TERM, [5 * TERM, 5 * TERM]),
        (UNEVEN, TERM, [TERM + 1, TERM - 1.5]),
        (EQUAL, torch.arange(6), [torch.arange(3), torch.arange(3)]),
        (EQUAL, FLAT, [FLAT[:4], FLAT[3:]]),
    ],
)
def test_what_a_right_step_does_not_share_is_another_value(
    sharing: Sharing, whole: Tensor, parts: list[Tensor]
) -> None:
    assert related([Value.of(part) for part in parts], Value.of(whole), sharing).how == "other"


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        (ROWS, [ROWS[:2], ROWS[:2]]),
        (ROWS, [ROWS.flatten(), ROWS.flatten()]),
        (TERM, [TERM, TERM * torch.nan]),
    ],
)
def test_values_that_cannot_be_compared_are_unknown(whole: Tensor, parts: list[Tensor]) -> None:
    assert related([Value.of(part) for part in parts], Value.of(whole), EQUAL).how == "unknown"


def test_rounding_of_gradients_that_should_be_zero_is_no_other_value() -> None:
    tiny = torch.full((4,), 1e-17, dtype=torch.float64)
    sharing = Sharing(EQUAL.rows, EQUAL.examples, scale=1.0)
    parts = [Value.of(3 * tiny), Value.of(-5 * tiny)]
    assert related(parts, Value.of(tiny), sharing).how in RELATED
