"""Backward passes that count less than others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case, Rank, check

pytestmark = pytest.mark.self_check

Rows = dict[str, torch.Tensor]


def make(generator: torch.Generator) -> Rows:
    rows = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    return {"rows": rows, "targets": rows.roll(1, 0)}


def squares(model: nn.Module, batch: Rows) -> torch.Tensor:
    return (model(batch["rows"]) - batch["targets"]).square().mean()  # type: ignore[no-any-return]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


def own_case(layout: str) -> Case:
    return Case(model=layers, batch=make, loss=squares, layout=layout, dtype=torch.float64)


def shrinks_what_is_there(model: nn.Module, shard: Rows, rank: Rank) -> None:
    """The gradients of the first half are divided by 2000 before the second half is added."""
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        (squares(model, {"rows": rows, "targets": targets}) / 2 * 2000).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2000
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


@pytest.mark.parametrize(
    ("step", "layout", "words", "line"),
    [
        (shrinks_what_is_there, "1x2", "pass 1 counts 0.0005 times", "parameter.grad /= 2000"),
    ],
)
def test_what_the_reduction_did_to_a_part_is_said(
    step: Any, layout: str, words: str, line: str
) -> None:
    verdict = check(own_case(layout), step)
    assert verdict.outcome == "different", verdict
    assert words in str(verdict)
    assert "clear the gradients" not in str(verdict)
    assert line in str(verdict)
