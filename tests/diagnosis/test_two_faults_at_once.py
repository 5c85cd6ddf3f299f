"""If two faults are present at once, the report names both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case.batch import take
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients

pytestmark = pytest.mark.self_check


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", ["2x2", "1x3"])
def test_divided_twice_and_a_rank_left_out_are_both_named(layout: str, dtype: torch.dtype) -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        LOSSES["mse_mean"](model, shard).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= rank.rank != 1
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size**2

    verdict = check(Case(model="mlp", loss="mse_mean", layout=layout, dtype=dtype), step)
    assert verdict.causes == ("rank_left_out", "averaged_twice"), verdict
    assert "rank_left_out and averaged_twice" in str(verdict)


@pytest.mark.parametrize("layout", ["2x2", "1x3"])
def test_a_sum_and_padded_duplicates_are_both_named(layout: str) -> None:
    case = Case(model="mlp", loss="mse_mean", layout=layout, shards="own", examples=14)

    def step(model: nn.Module, batch: Any, rank: Rank) -> None:
        padded = [*range(14), 0, 1]
        mine = padded[rank.rank :: rank.world_size][: -(-14 // rank.world_size)]
        LOSSES["mse_mean"](model, take(batch, mine)).backward()
        reduce_gradients(model, 1)

    verdict = check(case, step)
    assert verdict.causes == ("sampler_padding_counted", "sum_not_mean"), verdict


def test_what_two_causes_do_not_explain_is_not_named() -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        LOSSES["mse_mean"](model, shard).backward()
        reduce_gradients(model, rank.world_size)
        for number, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            parameter.grad *= 1.1 + 0.1 * number

    verdict = check(Case(model="mlp", loss="mse_mean", layout="1x2"), step)
    assert (verdict.outcome, verdict.causes) == ("different", ())
    assert "no known cause fits" in verdict.full_report()


def test_two_causes_that_cancel_each_other_are_not_named() -> None:
    """Each rank normalises its shard in two halves, and the average over the ranks is right."""

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        inputs, targets = shard["inputs"], shard["targets"]
        outputs = torch.cat([model(half) for half in inputs.chunk(2)])
        nn.functional.mse_loss(outputs, targets).backward()
        reduce_gradients(model, rank.world_size)

    verdict = check(Case(model="batch_norm", loss="mse_mean", layout="2x1"), step)
    assert (verdict.outcome, verdict.causes) == ("different", ()), verdict
