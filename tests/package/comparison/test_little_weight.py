"""A part of the model with little weight in the loss is compared as strictly as the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, assert_equivalent, check
from tests.equivalence.small_gpt import SmallGPT, next_token_loss, token_batch

pytestmark = pytest.mark.self_check

Change = Callable[[Tensor], Tensor]

CHANGES: dict[str, Change] = {
    "zeroed": torch.zeros_like,
    "negated": torch.neg,
    "tenfold": lambda gradient: 10 * gradient,
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.small_head = nn.Linear(16, 4)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(rows).tanh()
        return self.head(hidden), self.small_head(hidden)


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(16, 6, generator=generator),
        "first": torch.randn(16, 4, generator=generator),
        "second": torch.randn(16, 4, generator=generator),
    }


def loss_with(weight: float) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = model(batch["rows"])
        return F.mse_loss(first, batch["first"]) + weight * F.mse_loss(second, batch["second"])

    return loss


def case_with(weight: float, dtype: torch.dtype) -> Case:
    return Case(model=TwoHeads, batch=batch, loss=loss_with(weight), layout="1x2", dtype=dtype)


def step_with(weight: float, change: Change = torch.clone) -> Any:
    """A right step, after which ``change`` is applied to the gradients of the small head."""
    loss = loss_with(weight)

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()
        assert isinstance(model.small_head, nn.Linear)
        for parameter in model.small_head.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(change(parameter.grad))

    return step


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("dtype", "weight"),
    # Where the exponent has room, the weight does not matter.
    [(torch.float64, 1e-7), (torch.bfloat16, 1e-7), (torch.float16, 1e-3)],
    ids=str,
)
def test_a_wrong_gradient_of_a_head_with_little_weight_is_different(
    dtype: torch.dtype, weight: float, change: str
) -> None:
    verdict = check(case_with(weight, dtype), step_with(weight, CHANGES[change]))
    assert verdict.outcome == "different", verdict
    assert verdict.comparison is not None
    names = {one.name for one in verdict.comparison.differing}
    assert names == {"small_head.weight", "small_head.bias"}


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_the_right_gradient_of_such_a_head_is_the_same(dtype: torch.dtype) -> None:
    assert_equivalent(case_with(1e-7, dtype), step_with(1e-7))


def test_a_gradient_that_float16_cannot_hold_is_unknown_by_name() -> None:
    """Below 6e-8 float16 has no numbers, so one device holds zero as well."""
    verdict = check(case_with(1e-7, torch.float16), step_with(1e-7, torch.zeros_like))
    assert verdict.outcome == "unknown", verdict
    assert "small_head.weight" in verdict.reason


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_a_right_transformer_of_four_layers_is_the_same_in_16_bits(dtype: torch.dtype) -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        next_token_loss(ddp, shard).backward()

    case = Case(model=SmallGPT, batch=token_batch, loss=next_token_loss, layout="1x2", dtype=dtype)
    assert_equivalent(case, step)
