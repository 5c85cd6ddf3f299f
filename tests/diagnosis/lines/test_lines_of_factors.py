"""A factor that is wrong: the report points at the line that multiplies, divides or should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
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


def summed_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    total = torch.zeros(1)
    dist.all_reduce(total)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the fault
    clip_grad_norm_(model.parameters(), 1e9)


def loss_times_ranks(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    outputs = ddp(rows["x"])
    loss = nn.functional.mse_loss(outputs, rows["y"])
    scaled = loss * rank.world_size  # the fault
    scaled.backward()


def reduced_twice(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    for parameter in model.parameters():
        parameter.grad /= rank.world_size
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the fault


def gradients_times_ranks(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    mean_loss(ddp, rows).backward()
    for parameter in model.parameters():
        parameter.grad *= dist.get_world_size()  # the fault


def sum_under_ddp(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    outputs = ddp(rows["x"])
    loss = nn.functional.mse_loss(outputs, rows["y"], reduction="sum")  # the fault
    loss.backward()


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


def divided_in_backward_and_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    (mean_loss(model, rows) / rank.world_size).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.data /= rank.world_size  # the fault


def divided_by_ranks_of_a_node(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    for parameter in model.parameters():
        parameter.grad.div_(rank.local_world_size)  # the fault


def summed_in_the_loss(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    difference = ddp(rows["x"]) - rows["y"]
    loss = (difference**2).sum()  # the fault
    loss.backward()


def sum_loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets, reduction="sum")  # the fault


def summed_in_a_helper(model: Any, rows: Rows, rank: Rank) -> None:
    outputs = model(rows["x"])
    loss = sum_loss_of(outputs, rows["y"])
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= rank.world_size


SUMMED = {"loss": sum_loss}


@pytest.mark.parametrize(
    ("step", "changes", "cause", "fix"),
    [
        (summed_by_hand, {}, "sum_not_mean", "divide the gradients by 4"),
        (loss_times_ranks, {}, "sum_not_mean", "do not multiply the loss by 4"),
        (reduced_twice, {}, "reduced_more_than_once", "once in a step, not several"),
        (gradients_times_ranks, {}, "sum_not_mean", "do not multiply the gradients by 4"),
        (sum_under_ddp, SUMMED, "mean_not_sum", "multiply the summed loss by 4"),
        (sum_divided_by_hand, SUMMED, "mean_not_sum", "do not divide the gradients by 4"),
        (divided_after_ddp, {}, "averaged_twice", "DDP averages over the 4 ranks already"),
        (loss_divided_under_ddp, {}, "averaged_twice", "do not divide the loss by 4"),
        (divided_in_backward_and_by_hand, {}, "averaged_twice", "divide by 4"),
        (divided_by_ranks_of_a_node, {}, "divided_by_local_world_size", "not by 2"),
        (summed_in_the_loss, {}, "local_loss_summed", 'reduction="mean"'),
        (summed_in_a_helper, {}, "local_loss_summed", 'reduction="mean"'),
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
