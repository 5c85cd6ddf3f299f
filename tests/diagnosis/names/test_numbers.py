"""Factors, rounding, small parameters, and shares that would be noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Rank, check
from tests.diagnosis.names.small_case import Step, average, case, report_of
from tests.package.own_cases import loss as squares

pytestmark = pytest.mark.self_check


def divides_by(divisor: float) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        squares(model, shard).backward()
        average(model, divisor)

    return step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_factor_in_half_precision_is_no_rounding(dtype: torch.dtype) -> None:
    verdict = check(case("1x4", dtype=dtype), divides_by(3))
    assert verdict.outcome == "different"
    assert "low_precision_reduce" not in verdict.causes, verdict


def rounds_on_the_way(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        rounded = parameter.grad.bfloat16()
        dist.all_reduce(rounded)
        parameter.grad = rounded.to(parameter.dtype) / rank.world_size


def test_a_reduction_in_bfloat16_is_still_named() -> None:
    verdict = check(case("1x4"), rounds_on_the_way)
    assert verdict.causes == ("low_precision_reduce",), verdict


@pytest.mark.parametrize(
    ("layout", "dtype", "divisor"),
    [("1x4", torch.float64, 3), ("2x2", torch.float16, 8), ("2x2", torch.float64, 8)],
)
def test_a_world_size_of_another_run_is_one_cause(
    layout: str, dtype: torch.dtype, divisor: int
) -> None:
    verdict = check(case(layout, dtype=dtype), divides_by(divisor))
    assert verdict.causes == ("divided_by_wrong_number",), verdict
    assert f"every rank divided its gradients by {divisor}" in report_of(verdict)


def divides_a_buffer_by_eight(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The division is not seen: it is not made on the gradients."""
    squares(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / 8, gradients)


def test_a_number_that_was_not_seen_is_not_two_causes() -> None:
    verdict = check(case("2x2"), divides_a_buffer_by_eight)
    assert len(verdict.causes) < 2, verdict
    assert "every rank holds 0.50 0.50" in report_of(verdict)


class TwoHeads(nn.Module):
    """The second head has a gradient that is small beside that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.large(rows), self.small(rows)


def with_small_head(model: nn.Module, batch: Any) -> Any:
    large, small = model(batch["rows"])
    return F.mse_loss(large, batch["targets"]) + 1e-6 * small.square().mean()


def forgets_the_small_head(model: nn.Module, shard: Any, rank: Rank) -> None:
    large, small = model(shard["rows"])
    (F.mse_loss(large, shard["targets"]) + 0 * small.sum()).backward()
    average(model, rank.world_size)


def test_a_small_head_without_a_gradient_is_not_divided_by_anything() -> None:
    verdict = check(case(model=TwoHeads, loss=with_small_head), forgets_the_small_head)
    assert verdict.causes == (), verdict


def takes_the_largest(model: nn.Module, shard: Any, rank: Rank) -> None:
    F.mse_loss(model(shard["rows"]), shard["targets"][:, :2]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)


def of_two_targets(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"][:, :2])


def test_shares_of_as_many_examples_as_elements_are_not_printed() -> None:
    """Twelve elements are a mixture of any twelve gradients."""
    verdict = check(case(model=lambda: nn.Linear(5, 2), loss=of_two_targets), takes_the_largest)
    assert verdict.outcome == "different"
    assert verdict.shares is None or verdict.shares.by_example is None
    assert "unexplained: nothing" not in report_of(verdict)


def largest_of_four(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)


def test_what_is_no_mixture_has_no_shares_and_no_nearest_multiple() -> None:
    verdict = check(case("1x4"), largest_of_four)
    assert verdict.shares is None, verdict
    assert verdict.why_no_shares is not None
    assert "no mixture of" in verdict.why_no_shares.reason
    assert "nearest:" not in report_of(verdict)


def not_a_number_on_rank_1(model: nn.Module, shard: Any, rank: Rank) -> None:
    (squares(model, shard) * (float("nan") if rank.rank == 1 else 1)).backward()
    average(model, rank.world_size)


def not_a_number_afterwards(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    average(model, rank.world_size)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= float("nan") if rank.rank == 1 else 1


@pytest.mark.parametrize("step", [not_a_number_on_rank_1, not_a_number_afterwards])
def test_gradients_that_are_no_numbers_are_not_called_the_big_batch(step: Step) -> None:
    verdict = check(case(), step)
    assert verdict.outcome == "different"
    assert "is the big batch" not in report_of(verdict).replace("is the big batch's loss", "")


def thirds(model: nn.Module, shard: Any, rank: Rank) -> None:
    (squares(model, shard) * 4 / 3).backward()
    average(model, rank.world_size)


def test_no_report_divides_by_a_fraction() -> None:
    verdict = check(case("1x4"), thirds)
    assert verdict.outcome == "different"
    assert "divided by 3." in report_of(verdict) or "divided by" not in report_of(verdict)
