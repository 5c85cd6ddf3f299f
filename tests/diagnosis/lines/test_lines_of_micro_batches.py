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


def reduced_before_the_last(model: Any, rows: Rows, rank: Rank) -> None:
    parts = quarters(rows)
    for number, part in enumerate(parts):
        (mean_loss(model, part) / len(parts)).backward()
        if number == len(parts) - 2:
            flat = [parameter.grad for parameter in model.parameters()]
            for gradient in flat:
                gradient /= rank.world_size
                dist.all_reduce(gradient)  # the fault


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


UNEVEN = {"shards": "uneven"}
TOKENS = {"batch": tokens, "loss": token_mean}


@pytest.mark.parametrize(
    ("step", "changes", "cause", "fix"),
    [
        (not_divided_by_hand, {}, "accumulation_not_divided", "divide each loss by 2"),
        (reduced_before_the_last, {}, "accumulation_boundary_off_by_one", "after backward 4 of 4"),
        (two_passes, {}, "stale_gradient_added", "between these two backward passes"),
        (scaled, {}, "gradient_scaled_not_unscaled", "divide them by 1024"),
        (scaled_by_hand, {}, "gradient_scaled_not_unscaled", "by 4096, the loss scale"),
    ],
)
def test_the_faulty_line_of_a_window_or_a_weight_is_pointed_at(
    step: Any, changes: dict[str, Any], cause: str, fix: str
) -> None:
    assert_points_at_the_fault(judged(step, **changes), cause, fix)
