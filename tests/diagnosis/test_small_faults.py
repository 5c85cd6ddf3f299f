"""A small error, or an error in a few places, is caught too, and the report says where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.commands.planting import off_by_a_factor, one_element
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients

pytestmark = pytest.mark.self_check


def mlp(layout: str, dtype: torch.dtype = torch.float64) -> Case:
    return Case(model="mlp", loss="mse_mean", layout=layout, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "delta", "shown"),
    [(torch.float64, 2e-6, "1.000002 times"), (torch.float32, 2e-3, "1.002 times")],
)
def test_a_small_factor_is_caught_and_printed(dtype: torch.dtype, delta: float, shown: str) -> None:
    """No limit of a diagnosis lies at such a factor, so rounding does not decide what is said."""
    verdict = check(mlp("2x2", dtype), off_by_a_factor(delta))
    assert verdict.outcome == "different"
    assert shown in verdict.full_report()


@pytest.mark.parametrize(("dtype", "delta"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_one_wrong_element_is_caught_and_its_place_told(dtype: torch.dtype, delta: float) -> None:
    verdict = check(mlp("1x2", dtype), one_element(delta))
    assert verdict.outcome == "different"
    assert "element [1, 2] on rank" in verdict.full_report()


def last_parameter_is_off(model: nn.Module, shard: Any, rank: Rank) -> None:
    F.mse_loss(model(shard["inputs"]), shard["targets"]).backward()
    reduce_gradients(model, rank.world_size)
    last = list(model.parameters())[-1]
    assert last.grad is not None
    last.grad *= 1 + 2e-6


def test_one_parameter_that_is_off_is_the_only_one_told() -> None:
    verdict = check(mlp("1x2"), last_parameter_is_off)
    assert verdict.comparison is not None
    assert [one.name for one in verdict.comparison.differing] == ["2.bias"]


def rows(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "inputs": torch.randn(1000, 40, generator=generator),
        "targets": torch.randn(1000, 30, generator=generator),
    }


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["inputs"]), batch["targets"])


def ignores_one_example(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Weights example 17 with zero but counts it in the divisor."""
    rows = shard["inputs"]
    weight = torch.ones(len(rows), 1, dtype=rows.dtype)
    weight[17] = float(rank.rank != 0)
    loss = (weight * (model(rows) - shard["targets"]) ** 2).mean()
    loss.backward()
    reduce_gradients(model, rank.world_size)


def test_one_example_in_a_thousand_is_told_by_its_share() -> None:
    case = Case(model=lambda: nn.Linear(40, 30), batch=rows, loss=squares, layout="1x2")
    verdict = check(case, ignores_one_example)
    assert verdict.outcome == "different"
    assert verdict.shares is not None
    assert verdict.shares.by_example is not None
    of_all = verdict.shares.by_example[0]
    odd = [index for index, share in enumerate(of_all) if share is None or abs(share - 1) > 0.01]
    assert odd == [17]
    assert "17: 0.00" in verdict.full_report()


def loses_one_example(model: nn.Module, shard: Any, rank: Rank) -> None:
    keep = slice(None, -1) if rank.rank == 1 else slice(None)
    squares(model, {name: leaf[keep] for name, leaf in shard.items()}).backward()
    reduce_gradients(model, rank.world_size)


def test_one_example_in_a_thousand_that_is_never_read_is_told_by_number() -> None:
    case = Case(model=lambda: nn.Linear(40, 30), batch=rows, loss=squares, layout="1x2")
    verdict = check(case, loses_one_example)
    assert verdict.cause == "examples_dropped", verdict
    assert "example 999" in verdict.full_report()
