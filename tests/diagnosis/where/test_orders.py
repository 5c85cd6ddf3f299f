"""Lines whose order is wrong, weights without a gradient that change, and methods of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.setting import PointedLine
from tests.diagnosis.where.faulty import CASE, average, loss, marked_line, where


class Guided(nn.Module):
    """A slow copy of the encoder guides the fast one; it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Linear(6, 3)
        self.slow = nn.Linear(6, 3)
        for parameter in self.slow.parameters():
            parameter.requires_grad = False

    def forward(self, rows: Tensor) -> Any:
        return self.fast(rows)

    def guide(self, rows: Tensor) -> Any:
        with torch.no_grad():
            return torch.tanh(self.slow(rows))


def guided(model: Any, examples: Any) -> Any:
    return nn.functional.mse_loss(model(examples["rows"]), model.guide(examples["rows"]))


def guide_is_scaled(model: Any, shard: Any, rank: Any) -> None:
    with torch.no_grad():
        model.slow.weight.mul_(1.5)  # fault

    guided(model, shard).backward()
    average_those_with(model)


def guide_is_scaled_and_put_back(model: Any, shard: Any, rank: Any) -> None:
    kept = model.slow.weight.clone()
    with torch.no_grad():
        model.slow.weight.mul_(2)
        model.slow.weight.copy_(kept)
    nn.functional.l1_loss(model(shard["rows"]), model.guide(shard["rows"])).backward()  # fault
    average_those_with(model)


def average_those_with(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def shrink(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def differentiate(model: Any, examples: Any, factor: float = 1.0) -> None:
    value = factor * loss(model, examples)
    value.backward()


def shrinks_first(model: Any, shard: Any, rank: Any) -> None:
    differentiate(model, shard)
    shrink(model)  # fault
    average(model)


def differentiates_too_late(model: Any, shard: Any, rank: Any) -> None:
    differentiate(model, shard)
    average(model)
    value = 0.5 * loss(model, shard)
    add(value)  # fault


def add(value: Tensor) -> None:
    value.backward()


GUIDED = Case(model=Guided, batch=CASE.batch, loss=guided, layout="1x2")
SUMMED = replace(CASE, layout="1x2")


def _marked(lines: tuple[PointedLine, ...]) -> list[int]:
    return [one.line.number for one in lines if one.is_fault]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (guide_is_scaled, "changes slow.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_line_that_changes_weights_without_gradients_before_backward_is_marked(
    step: Callable[..., Any], words: str
) -> None:
    found = where(GUIDED, step)
    assert marked_line(step) in _marked(found.lines)
    assert any(words in one.note and "before backward" in one.note for one in found.lines)


def test_weights_that_are_put_back_are_not_blamed() -> None:
    found = where(GUIDED, guide_is_scaled_and_put_back)
    assert not any("before backward" in one.note for one in found.lines)
    assert marked_line(guide_is_scaled_and_put_back) in _marked(found.lines)


@pytest.mark.parametrize(
    ("case", "step", "function", "cause"),
    [
        (CASE, shrinks_first, shrinks_first, "clipped_before_reduce"),
        (
            SUMMED,
            differentiates_too_late,
            differentiates_too_late,
            "backward_after_reduction",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_faulty_line_is_marked_and_not_that_of_a_helper(
    case: Case, step: Callable[..., Any], function: Callable[..., Any], cause: str
) -> None:
    verdict = check(case, step)
    assert (verdict.outcome, verdict.causes) == ("different", (cause,)), verdict
    assert _marked(verdict.findings[0].lines) == [marked_line(function)]
