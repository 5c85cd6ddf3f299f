"""Micro-batches, weights of ranks and scales: the report points at the line that is wrong."""

from __future__ import annotations

from contextlib import nullcontext
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
    halves,
    judged,
    mean_loss,
    quarters,
)

pytestmark = pytest.mark.self_check


def average(model: Any, rank: Rank) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def cleared_in_the_loop(model: Any, rows: Rows, rank: Rank) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    parts = quarters(rows)
    for part in parts:
        optimizer.zero_grad()  # the fault
        loss = mean_loss(model, part) / len(parts)
        loss.backward()
    average(model, rank)


def set_to_none_in_the_loop(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    first, second = halves(rows)
    with ddp.no_sync():
        (mean_loss(ddp, first) / 2).backward()
    for parameter in model.parameters():
        parameter.grad = None  # the fault
    (mean_loss(ddp, second) / 2).backward()


def not_divided(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    parts = quarters(rows)
    for number, part in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else ddp.no_sync():
            outputs = ddp(part["x"])
            loss = nn.functional.mse_loss(outputs, part["y"])  # the fault
            loss.backward()


class Accumulator:
    """Adds up micro-batches by hand."""

    def __init__(self, model: Any, rank: Rank) -> None:
        self.model, self.rank = model, rank

    def backward(self, part: Rows) -> None:
        mean_loss(self.model, part).backward()  # the fault

    def window(self, rows: Rows) -> None:
        for part in halves(rows):
            self.backward(part)
        average(self.model, self.rank)


def not_divided_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    Accumulator(model, rank).window(rows)


def synchronised_one_too_early(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    parts = quarters(rows)
    for number, part in enumerate(parts):
        window_ends = (number + 2) % len(parts) == 0
        with nullcontext() if window_ends else ddp.no_sync():  # the fault
            (mean_loss(ddp, part) / len(parts)).backward()


def reduced_before_the_last(model: Any, rows: Rows, rank: Rank) -> None:
    parts = quarters(rows)
    for number, part in enumerate(parts):
        (mean_loss(model, part) / len(parts)).backward()
        if number == len(parts) - 2:
            flat = [parameter.grad for parameter in model.parameters()]
            for gradient in flat:
                gradient /= rank.world_size
                dist.all_reduce(gradient)  # the fault


def own_mean_under_ddp(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    outputs = ddp(rows["x"])
    loss = (outputs - rows["y"]).square().mean()  # the fault
    loss.backward()


def own_mean_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    error = nn.functional.mse_loss(model(rows["x"]), rows["y"])  # the fault
    error.backward()
    average(model, rank)


def tokens(generator: torch.Generator) -> Rows:
    valid = (torch.arange(16) % 7 < torch.arange(16) // 3 + 1).double()
    return {
        "x": torch.randn(16, 6, generator=generator, dtype=torch.float64),
        "y": torch.randn(16, 3, generator=generator, dtype=torch.float64),
        "valid": valid,
    }


def token_mean(model: Any, rows: Rows) -> Any:
    errors = (model(rows["x"]) - rows["y"]).square().mean(1) * rows["valid"]
    total = errors.sum()
    return total / rows["valid"].sum()


def own_tokens(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss = token_mean(ddp, rows)  # the fault
    loss.backward()


def two_passes(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    probe = mean_loss(ddp, rows)
    probe.backward()  # the fault
    clip_grad_norm_(model.parameters(), 1e9)
    mean_loss(ddp, rows).backward()


def scaled(model: Any, rows: Rows, rank: Rank) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp = DistributedDataParallel(model)
    loss = mean_loss(ddp, rows)
    scaled_loss = scaler.scale(loss)
    scaled_loss.backward()  # the fault


def scaled_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    scale = 2.0**12
    loss = mean_loss(model, rows)
    larger = loss * scale
    larger.backward()  # the fault
    average(model, rank)


def scaled_by_rank(model: Any, rows: Rows, rank: Rank) -> None:
    scale = 64.0 * 2**rank.rank
    loss = mean_loss(model, rows)
    (loss * scale).backward()  # the fault
    average(model, rank)
    for parameter in model.parameters():
        parameter.grad.div_(scale)


def scaler_by_rank(model: Any, rows: Rows, rank: Rank) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0 * 2**rank.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(mean_loss(model, rows)).backward()  # the fault
    average(model, rank)
    scaler.unscale_(optimizer)


def clipped_first(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    clip_grad_norm_(model.parameters(), 0.3)  # the fault
    average(model, rank)
    clip_grad_norm_(model.parameters(), 1e9)


def clipped_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad *= min(1.0, 0.3 / float(norm))  # the fault
    average(model, rank)


def reduced_in_half(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    for parameter in model.parameters():
        half = (parameter.grad / rank.world_size).to(torch.bfloat16)
        dist.all_reduce(half)  # the fault
        parameter.grad.copy_(half)


UNEVEN = {"shards": "uneven"}
TOKENS = {"batch": tokens, "loss": token_mean}


@pytest.mark.parametrize(
    ("step", "changes", "cause", "fix"),
    [
        (cleared_in_the_loop, {}, "only_last_micro_batch", "not between its 4 backwards"),
        (set_to_none_in_the_loop, {}, "only_last_micro_batch", "not between its 2 backwards"),
        (not_divided, {}, "accumulation_not_divided", "divide each loss by 4"),
        (not_divided_by_hand, {}, "accumulation_not_divided", "divide each loss by 2"),
        (synchronised_one_too_early, {}, "accumulation_boundary_off_by_one", "first 3 of the 4"),
        (reduced_before_the_last, {}, "accumulation_boundary_off_by_one", "after backward 4 of 4"),
        (own_mean_under_ddp, UNEVEN, "uneven_shards_weighted_equally", "all 16 examples"),
        (own_mean_by_hand, UNEVEN, "uneven_shards_weighted_equally", "all 16 examples"),
        (own_tokens, TOKENS, "token_counts_weighted_equally", "multiply it by 4"),
        (two_passes, {}, "stale_gradient_added", "between these two backward passes"),
        (scaled, {}, "gradient_scaled_not_unscaled", "divide them by 1024"),
        (scaled_by_hand, {}, "gradient_scaled_not_unscaled", "by 4096, the loss scale"),
        (scaled_by_rank, {}, "scaler_differs_between_ranks", "all 4 ranks one scale"),
        (scaler_by_rank, {}, "scaler_differs_between_ranks", "all 4 ranks one scale"),
        (clipped_first, {}, "clipped_before_reduce", "of all 4 ranks are reduced"),
        (clipped_by_hand, {}, "clipped_before_reduce", "of all 4 ranks are reduced"),
        (reduced_in_half, {}, "low_precision_reduce", "reduce the gradients in float64"),
    ],
)
def test_the_faulty_line_of_a_window_or_a_weight_is_pointed_at(
    step: Any, changes: dict[str, Any], cause: str, fix: str
) -> None:
    assert_points_at_the_fault(judged(step, **changes), cause, fix)
