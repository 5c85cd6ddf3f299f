"""Accumulation windows that are divided by the length of a longer one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.diagnosis.causes.named import (
    case_of,
    different,
    faulty_lines,
    first_finding,
    loss,
)

Shard = dict[str, Tensor]

FULL_WINDOW = 4


def window(shard: Shard, size: int = 2) -> list[Shard]:
    """The micro-batches that are left at the end of an epoch: three of two examples."""
    count = len(shard["rows"])
    return [
        {name: leaf[first : first + size] for name, leaf in shard.items()}
        for first in range(0, count, size)
    ]


def loss_divided_by_full_window(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    micro_batches = window(shard)
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else ddp.no_sync():
            (loss(ddp, micro_batch) / FULL_WINDOW).backward()


def gradient_divided_by_full_window(model: nn.Module, shard: Shard, rank: Rank) -> None:
    for micro_batch in window(shard):
        loss(model, micro_batch).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= FULL_WINDOW * rank.world_size


def divided_by_its_own_length(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    micro_batches = window(shard)
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else ddp.no_sync():
            (loss(ddp, micro_batch) / len(micro_batches)).backward()


def not_divided(model: nn.Module, shard: Shard, rank: Rank) -> None:
    for micro_batch in window(shard):
        loss(model, micro_batch).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def divided_by_ranks_too(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    micro_batches = window(shard)
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else ddp.no_sync():
            (loss(ddp, micro_batch) / len(micro_batches) / rank.world_size).backward()


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (loss_divided_by_full_window, "(loss(ddp, micro_batch) / FULL_WINDOW).backward()"),
        (gradient_divided_by_full_window, "parameter.grad /= FULL_WINDOW * rank.world_size"),
    ],
)
def test_a_short_window_that_is_divided_as_a_full_one_is_named(step: Any, line: str) -> None:
    verdict = different(case_of(), step)
    finding = first_finding(verdict)
    assert finding.cause == "last_window_divided_by_full", verdict
    assert faulty_lines(verdict) == [line], verdict
    assert finding.detail == "3 micro-batches, divided by 4"
    assert finding.fix == "divide by the number of micro-batches in this window (3), not by 4."


def test_a_window_that_is_divided_by_its_own_length_is_right() -> None:
    verdict = check(case_of(), divided_by_its_own_length)
    assert verdict.outcome == "same", verdict


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (not_divided, "accumulation_not_divided"),
        (divided_by_ranks_too, "averaged_twice"),
    ],
)
def test_other_divisors_of_a_window_have_other_names(step: Any, cause: str | None) -> None:
    verdict = different(case_of(), step)
    assert verdict.cause == cause, verdict
