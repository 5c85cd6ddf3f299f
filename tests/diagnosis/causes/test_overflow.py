"""Gradients that are finite on every rank, and not after they were added."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Rank
from tests.diagnosis.causes.named import (
    accepted,
    case_of,
    different,
    faulty_lines,
    first_finding,
    loss,
)

Shard = dict[str, Tensor]


def added_in_float16(model: nn.Module, shard: Shard, rank: Rank) -> None:
    scale = 60_000.0
    (loss(model, shard) * scale).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        narrow = parameter.grad.to(torch.float16)
        dist.all_reduce(narrow)  # in float16
        parameter.grad = narrow.to(parameter.dtype) / rank.world_size / scale


def divided_by_nothing(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        narrow = parameter.grad.to(torch.float16)
        dist.all_reduce(narrow)
        parameter.grad = narrow.to(parameter.dtype)


def not_finite_before(model: nn.Module, shard: Shard, rank: Rank) -> None:
    (loss(model, shard) * (float("inf") if rank.rank == 2 else 1.0)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        narrow = parameter.grad.to(torch.float16)
        dist.all_reduce(narrow)
        parameter.grad = narrow.to(parameter.dtype) / rank.world_size


def test_a_sum_that_overflows_in_float16_is_named_with_its_reduction() -> None:
    verdict = different(case_of(), added_in_float16)
    finding = first_finding(verdict)
    assert accepted(verdict) == {"overflow_in_reduction"}, verdict
    assert faulty_lines(verdict) == ["dist.all_reduce(narrow)  # in float16"], verdict
    assert "every rank's own gradients are finite" in finding.because
    assert finding.fix == "divide by 4 before the reduction, or reduce in float32."


def test_a_finite_sum_in_float16_does_not_overflow() -> None:
    verdict = different(case_of(), divided_by_nothing)
    assert "overflow_in_reduction" not in accepted(verdict), verdict


def test_a_gradient_that_was_not_finite_before_does_not_overflow_in_the_reduction() -> None:
    verdict = different(case_of(), not_finite_before)
    assert "overflow_in_reduction" not in accepted(verdict), verdict
