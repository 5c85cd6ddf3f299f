"""What was not certainly seen is not said: lines that look as if they were the fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import check
from tests.diagnosis.lines.faulty_line import Step, case, mean_squares, notes

FOUR = case("1x4")
TEMPORARY = "a temporary tensor"


def flat_gradient(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def write_back(model: Any, flat: torch.Tensor) -> None:
    at = 0
    for parameter in model.parameters():
        parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()


def reduces_a_part_of_a_buffer(model: Any, batch: Any, rank: Any) -> None:
    mean_squares(model, batch).backward()
    flat = flat_gradient(model)
    dist.all_reduce(flat[: len(flat)].view(-1))
    write_back(model, flat)


def waits_for_the_others(model: Any, batch: Any, rank: Any) -> None:
    dist.all_reduce(torch.zeros(1))
    mean_squares(model, batch).backward()
    flat = flat_gradient(model)
    dist.all_reduce(flat)
    write_back(model, flat)


def reads_the_result_in_a_helper(model: Any, batch: Any, rank: Any) -> None:
    total_of(torch.tensor(1.0).clone())
    mean_squares(model, batch).backward()
    flat = flat_gradient(model)
    dist.all_reduce(flat)
    write_back(model, flat)


def total_of(tensor: torch.Tensor) -> float:
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize(
    "step", [reduces_a_part_of_a_buffer, waits_for_the_others, reads_the_result_in_a_helper]
)
def test_a_result_that_is_used_or_never_wanted_is_not_called_lost(step: Step) -> None:
    verdict = check(FOUR, step)
    assert verdict.cause == "sum_not_mean"
    assert TEMPORARY not in notes(verdict)


def last_under_no_sync(model: Any, batch: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    parts = list(zip(*(leaf.chunk(4) for leaf in batch.values()), strict=True))
    for number, (x, y) in enumerate(parts):
        synchronises = number == 0
        if synchronises:
            mean_squares(ddp, {"x": x, "y": y}).div(4).backward()
        else:
            with ddp.no_sync():
                mean_squares(ddp, {"x": x, "y": y}).div(4).backward()


def test_a_block_that_python_comes_back_to_is_counted_once() -> None:
    verdict = check(FOUR, last_under_no_sync)
    assert verdict.cause == "accumulation_boundary_off_by_one"
    assert "synchronises is false 3 of 4 times" in notes(verdict)
