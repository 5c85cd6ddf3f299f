"""A module of its own gets only the name of a cause that can act on a module, or that was seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Rank, check
from ddp_equivalence.diagnosis.causes import CAUSE_OF
from tests.diagnosis.names.small_case import average, case, make_batch, report_of

pytestmark = pytest.mark.self_check


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 6)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(rows))
        return self.left(hidden), self.right(hidden)


def both(model: nn.Module, batch: Any) -> Tensor:
    left, right = model(batch["rows"])
    return F.mse_loss(left, batch["targets"]) + F.l1_loss(right, batch["targets"])


def one_head_as_on_rank_0(model: Any, shard: Any, rank: Rank) -> None:
    """The left head is given the gradient of rank 0 by hand, and the trunk noise."""
    both(model, shard).backward()
    average(model, rank.world_size)
    own = torch.autograd.grad(both(model, shard), list(model.left.parameters()))
    for parameter, gradient in zip(model.left.parameters(), own, strict=True):
        dist.broadcast(gradient, 0)
        parameter.grad = gradient
    model.trunk.weight.grad += torch.linspace(0, 1, 30).view(6, 5)


def test_examples_are_not_called_the_same_for_one_module_alone() -> None:
    """All modules read the same examples, so that this cannot be so of one of them."""
    verdict = check(case(model=TwoHeads, loss=both), one_head_as_on_rank_0)
    assert verdict.outcome == "different"
    by_module = verdict.localisation.findings_by_module
    assert by_module is not None
    names = {one.cause for one in by_module.values() if not one.because}
    assert all(CAUSE_OF[name].of_a_module for name in names), verdict
    assert "every_rank_same_data" not in report_of(verdict).partition("Nearest known")[0]


def one_head_undivided(model: Any, shard: Any, rank: Rank) -> None:
    both(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if parameter is not model.left.weight and parameter is not model.left.bias:
            parameter.grad /= rank.world_size
    model.trunk.weight.grad += torch.linspace(0, 1, 30).view(6, 5)


def test_a_factor_may_be_of_one_module_alone() -> None:
    verdict = check(case("1x4", model=TwoHeads, loss=both, batch=make_batch), one_head_undivided)
    assert verdict.outcome == "different"
    found = verdict.localisation.findings_by_module
    assert found is not None
    assert {module: one.cause for module, one in found.items()} == {"left": "sum_not_mean"}
    report = report_of(verdict)
    assert "On the parameters of left alone, the numbers fit sum_not_mean." in report
    assert "alone the cause is sum_not_mean" not in report
