"""An operation draws random numbers only where it has something to drop or to choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ddp_equivalence.measurement.draws import DrawLog
from ddp_equivalence.measurement.operation_log import OperationLog


def attend(rate: float) -> Tensor:
    heads = torch.ones(2, 3, 4, 5)
    return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=rate)


@pytest.mark.parametrize(
    ("draws", "compute"),
    [
        (False, lambda: attend(0.0)),
        (True, lambda: attend(0.5)),
        (False, lambda: functional.dropout(torch.ones(4), 0.5, training=False)),
        (True, lambda: functional.dropout(torch.ones(4), 0.5)),
        (True, lambda: torch.rand(3)),
        (False, lambda: torch.empty_like(torch.ones(3))),
    ],
)
def test_what_drops_nothing_draws_nothing(draws: bool, compute: object) -> None:
    assert callable(compute)
    log, operations = DrawLog(), OperationLog()
    with log.watching():
        compute()
    with operations:
        compute()
    assert bool(log.draws) == draws
    assert any(one.draws for one in operations.found({}).operations) == draws
