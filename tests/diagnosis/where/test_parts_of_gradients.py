"""Elements that belong to no slice, passes that count less, and groups that nothing joins."""

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


def in_blocks(model: nn.Module, shard: Rows, rank: Rank) -> None:
    """The buffer has 49 numbers, and 6 blocks of 8 are reduced."""
    squares(model, shard).backward()
    parameters = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    for number in range(len(flat) // 8):
        block = flat[8 * number : 8 * (number + 1)]
        dist.all_reduce(block)
        block /= rank.world_size
    torch.nn.utils.vector_to_parameters(flat, [p.grad for p in parameters if p.grad is not None])


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


def scatters_inside_pairs(model: nn.Module, shard: Rows, rank: Rank) -> None:
    """Both sums are over the same pair; the second one is of halves of the first."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inner = pairs[rank.rank // 2]
    outer = pairs[rank.rank // 2]
    squares(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        total = parameter.grad.flatten().repeat(2)
        dist.all_reduce(total, group=inner)
        half = total[: parameter.grad.numel()].square()
        dist.all_reduce(half, group=outer)
        parameter.grad.copy_((half.sqrt() / rank.world_size).view_as(parameter.grad))


@pytest.mark.parametrize(
    ("step", "layout", "words", "line"),
    [
        (in_blocks, "1x3", "element 3 of 2.bias stays the rank's own", "block = flat[8 *"),
        (shrinks_what_is_there, "1x2", "pass 1 counts 0.0005 times", "parameter.grad /= 2000"),
        (scatters_inside_pairs, "2x2", "no collective joins all ranks", "outer = pairs"),
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
