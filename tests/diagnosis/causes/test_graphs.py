"""DDP in a later step that leaves out a parameter of the first one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.diagnosis.causes.named import (
    accepted,
    case_of,
    different,
    faulty_lines,
    first_finding,
)

Batch = dict[str, Tensor]


class TwoHeads(nn.Module):
    """The second head is used where a flag of the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)
        self.extra = nn.Linear(7, 3)

    def forward(self, rows: Tensor, with_extra: bool) -> Tensor:
        hidden = torch.tanh(self.trunk(rows))
        outputs: Tensor = self.head(hidden)
        return outputs + self.extra(hidden) if with_extra else outputs


def two_batches(generator: torch.Generator) -> Batch:
    """Two steps of 24 examples; the examples of the second have no flag."""
    return {
        "rows": torch.randn(48, 5, generator=generator),
        "targets": torch.randn(48, 3, generator=generator),
        "extra": torch.arange(48) < 24,
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    with_extra = bool(batch["extra"].any())
    return F.mse_loss(model(batch["rows"], with_extra), batch["targets"])


CASE = case_of(model=TwoHeads, batch=two_batches, loss=loss)


def wrapped_once(model: Any, **options: Any) -> Any:
    """The wrapper of this model, which is made in the first step."""
    if "wrapped" not in model.__dict__:
        model.__dict__["wrapped"] = DistributedDataParallel(model, **options)
    return model.__dict__["wrapped"]


def static_graph(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = wrapped_once(model, static_graph=True)
    loss(ddp, shard).backward()


def no_search_for_unused_parameters(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = wrapped_once(model)
    loss(ddp, shard).backward()


def search_for_unused_parameters(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = wrapped_once(model, find_unused_parameters=True)
    loss(ddp, shard).backward()


def never_reduced(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = wrapped_once(model, find_unused_parameters=True)
    if shard["extra"].any():
        loss(ddp, shard).backward()
    else:
        loss(model, shard).backward()


@pytest.mark.parametrize(
    ("step", "seen", "fix"),
    [
        (static_graph, "static_graph was set", "find_unused_parameters=True, no static"),
        (
            no_search_for_unused_parameters,
            "DDP waited",
            "find_unused_parameters=True, or use every",
        ),
    ],
)
def test_a_later_step_that_leaves_a_head_out_is_named(step: Any, seen: str, fix: str) -> None:
    verdict = different(CASE, step, steps=2)
    finding = first_finding(verdict)
    assert finding.cause == "graph_changed", verdict
    assert seen in finding.because
    assert "extra.weight, extra.bias had a gradient in step 1" in finding.because
    assert fix in finding.fix
    assert faulty_lines(verdict) == [
        'model.__dict__["wrapped"] = DistributedDataParallel(model, **options)'
    ], verdict


def test_static_graph_is_mentioned_where_it_was_seen() -> None:
    assert "static_graph" in str(different(CASE, static_graph, steps=2))


def test_ddp_that_looks_for_unused_parameters_is_right() -> None:
    verdict = check(CASE, search_for_unused_parameters, steps=2)
    assert verdict.outcome == "same", verdict


def test_a_step_without_ddp_is_no_changed_graph() -> None:
    verdict = different(CASE, never_reduced, steps=2)
    assert "graph_changed" not in accepted(verdict), verdict
