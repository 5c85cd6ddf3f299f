"""A term of the loss that counts too often or too seldom is shown by its lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.where.faulty import CASE, NEAR, average, marked_line, where


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.value = nn.Linear(8, 3)
        self.policy = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(rows))
        return self.value(hidden), self.policy(hidden)


def terms_of(model: Any, examples: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    value, policy = model(examples["rows"])
    labels = examples["targets"].argmax(1)
    return F.mse_loss(value, examples["targets"]), F.cross_entropy(policy, labels)


def both(model: Any, examples: dict[str, Tensor]) -> Tensor:
    first, second = terms_of(model, examples)
    return first + 0.5 * second


def scales_one_term(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    first, second = terms_of(ddp, shard)
    second = second / dist.get_world_size()  # fault
    total = first + 0.5 * second
    total.backward()


def reduces_one_head_twice(model: Any, shard: Any, rank: Any) -> None:
    both(model, shard).backward()
    average(model)
    for parameter in model.policy.parameters():
        parameter.grad *= 0.25


TWO_HEADS = replace(CASE, model=TwoHeads, loss=both)


@pytest.mark.parametrize(
    ("step", "function"),
    [(scales_one_term, scales_one_term)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_term_that_counts_otherwise_is_found(step: Callable[..., Any], function: Any) -> None:
    found = where(TWO_HEADS, step)
    assert "the big batch's" in found.headline
    marked = [one.line.number for one in found.lines if one.is_fault]
    assert min(abs(one - marked_line(function)) for one in marked) <= NEAR


def test_a_factor_after_backward_is_no_term_of_the_loss() -> None:
    found = where(TWO_HEADS, reduces_one_head_twice)
    assert found.kind == "reduction"
    assert "term" not in found.headline
