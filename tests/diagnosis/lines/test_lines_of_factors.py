"""A factor that is wrong: the report points at the line that multiplies, divides or should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Rank
from tests.package.pointed_at import (
    Rows,
    assert_points_at_the_fault,
    judged,
    mean_loss,
    shown,
    sum_loss,
)

pytestmark = pytest.mark.self_check


def loss_times_ranks(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    outputs = ddp(rows["x"])
    loss = nn.functional.mse_loss(outputs, rows["y"])
    scaled = loss * rank.world_size  # the fault
    scaled.backward()


def sum_divided_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    sum_loss(model, rows).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(rank.world_size)  # the fault


def sum_with_avg(model: Any, rows: Rows, rank: Rank) -> None:
    sum_loss(model, rows).backward()
    flat = torch.cat([one.grad.reshape(-1) for one in model.parameters()])
    gathered = [torch.empty_like(flat) for _ in range(rank.world_size)]
    dist.all_gather(gathered, flat)
    flat = torch.stack(gathered).mean(0)
    at = 0
    for parameter in model.parameters():
        size = parameter.numel()
        parameter.grad.copy_(flat[at : at + size].view_as(parameter))
        at += size


def divided_after_ddp(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    mean_loss(ddp, rows).backward()
    clip_grad_norm_(model.parameters(), 1e9)
    for parameter in model.parameters():
        parameter.grad /= rank.world_size  # the fault


def loss_divided_under_ddp(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss = mean_loss(ddp, rows)
    loss = loss / dist.get_world_size()  # the fault
    loss.backward()


SUMMED = {"loss": sum_loss}


@pytest.mark.parametrize(
    ("step", "changes", "cause", "fix"),
    [
        (loss_times_ranks, {}, "sum_not_mean", "do not multiply the loss by 4"),
        (sum_divided_by_hand, SUMMED, "mean_not_sum", "do not divide the gradients by 4"),
        (divided_after_ddp, {}, "averaged_twice", "DDP averages over the 4 ranks already"),
        (loss_divided_under_ddp, {}, "averaged_twice", "do not divide the loss by 4"),
    ],
)
def test_the_line_with_the_wrong_factor_is_pointed_at(
    step: Any, changes: dict[str, Any], cause: str, fix: str
) -> None:
    assert_points_at_the_fault(judged(step, **changes), cause, fix)


def test_a_mean_of_gathered_gradients_has_no_line_that_divides() -> None:
    verdict = judged(sum_with_avg, **SUMMED)
    assert verdict.cause == "mean_not_sum", verdict
    assert "no line divides" not in shown(verdict)
