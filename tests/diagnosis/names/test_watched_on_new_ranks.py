"""A step that makes groups of ranks is watched on new ranks; a report without that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.diagnosis.names.small_case import average, case, report_of
from tests.package.own_cases import loss as squares
from tests.package.pointed_at import faulty_lines

pytestmark = pytest.mark.self_check

Gradients = dict[str, Tensor]


def halves(shard: Any) -> Any:
    return zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True)


def whole(model: nn.Module) -> Gradients:
    sharded: dict[str, Any] = {name: one.grad for name, one in model.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in sharded.items()}


def sharded_and_not_divided(model: nn.Module, shard: Any, rank: Rank) -> Gradients:
    fully_shard(model)
    for rows, targets in halves(shard):
        F.mse_loss(model(rows), targets).backward()
    return whole(model)


def in_a_new_group_and_not_divided(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model, process_group=dist.new_group())
    for rows, targets in halves(shard):
        F.mse_loss(ddp(rows), targets).backward()


@pytest.mark.parametrize("layout", ["1x2", "1x4"])
@pytest.mark.parametrize("step", [sharded_and_not_divided, in_a_new_group_and_not_divided])
def test_a_step_that_makes_a_group_is_watched_and_named_as_without_one(
    step: Any, layout: str
) -> None:
    verdict = check(case(layout), step)
    ranks = int(layout[-1])
    assert verdict.outcome == "different"
    assert len(verdict.observed) == ranks, verdict.why_not_watched
    assert "accumulation_not_divided" in verdict.causes, verdict
    assert "sum_not_mean" not in verdict.causes, verdict
    assert ["F.mse_loss" in line for line in faulty_lines(verdict)] == [True], str(verdict)


def loses_the_tail(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Only the gradients of the first layer are reduced, by hand."""
    squares(model, shard).backward()
    for parameter in list(model.parameters())[:2]:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def test_without_a_wrapper_no_bucket_is_named() -> None:
    verdict = check(case(), loses_the_tail)
    assert verdict.outcome == "different"
    accepted = {cause for one in verdict.findings if one.accepted for cause in one.causes}
    assert accepted == {"parameter_not_reduced"}, verdict


def test_a_report_without_a_second_run_says_so_and_why(tmp_path: Path) -> None:
    def raises_the_second_time(model: nn.Module, shard: Any, rank: Rank) -> None:
        squares(model, shard).backward()
        average(model, rank.world_size + 1)
        (tmp_path / f"{rank.rank}").touch(exist_ok=False)

    verdict = check(case(), raises_the_second_time)
    assert (verdict.outcome, verdict.observed) == ("different", {})
    assert verdict.why_not_watched
    short = " ".join(str(verdict).split())
    assert "there was no second run, because the ranks failed in it" in short
    assert f"because {verdict.why_not_watched}" in report_of(verdict)
