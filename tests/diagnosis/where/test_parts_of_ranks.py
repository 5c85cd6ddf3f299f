"""Ranks that share sequences, units of a layer, or numbers show the line at which they part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case
from ddp_equivalence.report.blocks import source_of
from tests.diagnosis.where.faulty import CASE, average, distance, unnamed

LENGTH, WIDTH, HIDDEN = 8, 5, 6


def add_up(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def counted(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(12, 6, generator=generator),
        "targets": torch.randn(12, 3, generator=generator),
        "counts": torch.randint(1, 9, (12,), generator=generator),
    }


def summed_errors(model: Any, batch: dict[str, Tensor]) -> Any:
    errors = (model(batch["rows"]) - batch["targets"]).square().sum(1)
    return (errors * batch["counts"]).sum()


def counted_loss(model: Any, batch: dict[str, Tensor]) -> Any:
    return summed_errors(model, batch) / batch["counts"].sum()


def largest_count_of_a_message(model: Any, shard: Any, rank: Any) -> None:
    message = torch.tensor([int(shard["counts"].sum()), int(shard["counts"].max())])
    dist.all_reduce(message, dist.ReduceOp.MAX)  # fault
    total, _ = message.tolist()
    (summed_errors(model, shard) / total).backward()
    add_up(model)


class Pooled(nn.Module):
    """Standardises its outputs over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.everyone: Callable[[Tensor], Tensor] = lambda one: one

    def forward(self, rows: Tensor) -> Any:
        output = self.layer(rows)
        sums = torch.stack([output.sum(0), output.square().sum(0), torch.ones_like(output).sum(0)])
        total, square, count = self.everyone(sums)
        mean = total / count
        return (output - mean) / (square / count - mean.square() + 0.1).sqrt()


def pooled_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.l1_loss(model(batch["rows"]), batch["targets"])


def moments_without_a_gradient(model: Any, shard: Any, rank: Any) -> None:
    def everyone(sums: Tensor) -> Tensor:
        dist.all_reduce(sums)  # fault
        return sums

    logged = []
    model.everyone = everyone
    value = pooled_loss(model, shard)
    copy = value.clone()
    dist.all_reduce(copy)  # only for the log, so nothing of it comes back
    logged.append(copy.item())
    value.backward()
    average(model)


COUNTS = replace(CASE, batch=counted, loss=counted_loss, layout="1x2")
POOLED = replace(CASE, model=Pooled, loss=pooled_loss, layout="1x2")


@pytest.mark.parametrize(
    ("case", "step", "within"),
    [
        (COUNTS, largest_count_of_a_message, None),
        (POOLED, moments_without_a_gradient, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_at_which_parts_of_ranks_go_astray_comes_first(
    case: Case, step: Any, within: Any
) -> None:
    where = unnamed(case, step)
    assert where.is_right_alone
    assert where.lines[0].is_fault
    assert distance(replace(where, lines=where.lines[:1]), within or step) == 0, where.lines


class Numbered(nn.Module):
    """Adds what it has learned of each row's number in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places, self.first = nn.Linear(6, 3), nn.Embedding(12, 3), 0

    def forward(self, rows: Tensor) -> Any:
        numbers = torch.arange(len(rows)) + self.first
        return self.layer(rows) + self.places(numbers)


def rows_numbered_rightly(model: Any, shard: Any, rank: Any) -> None:
    model.first = rank.rank * len(shard["rows"])
    largest_count_of_a_message(model, shard, rank)


def test_numbers_of_rows_that_are_right_in_the_end_are_not_shown() -> None:
    where = unnamed(replace(COUNTS, model=Numbered), rows_numbered_rightly)
    shown = [source_of(one.line) for one in where.lines]
    assert "dist.all_reduce(message, dist.ReduceOp.MAX)  # fault" in shown
    assert not any("torch.arange" in one for one in shown), shown


def test_only_the_collective_that_the_loss_is_made_of_loses_a_gradient() -> None:
    where = unnamed(POOLED, moments_without_a_gradient)
    assert where.headline == "a collective loses a gradient"
    assert len([one for one in where.lines if one.is_fault]) == 1
