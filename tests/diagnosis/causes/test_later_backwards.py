"""A backward that runs after gradients have been reduced."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
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
    lines_shown,
)

Shard = dict[str, Tensor]


def both_losses(model: Any, shard: Shard) -> tuple[Tensor, Tensor]:
    outputs = model(shard["rows"])
    return F.mse_loss(outputs, shard["targets"]), 0.3 * outputs.abs().mean()


def sum_of_losses(model: nn.Module, batch: Shard) -> Tensor:
    loss, aux = both_losses(model, batch)
    return loss + aux


CASE = case_of(loss=sum_of_losses)


def aux_after_ddp(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss, aux = both_losses(ddp, shard)
    loss.backward(retain_graph=True)
    aux.backward()


def aux_after_reducing_by_hand(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss, _ = both_losses(model, shard)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size
    _, aux = both_losses(model, shard)
    aux.backward()


def aux_of_rank_0_only(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    sum_of_losses(ddp, shard).backward()
    if rank.rank == 0:
        model(shard["rows"]).mean().backward()  # of rank 0


def aux_before_reducing(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss, aux = both_losses(model, shard)
    loss.backward(retain_graph=True)
    aux.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def boundary_off_by_one(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    micro_batches = [{name: leaf[i::3] for name, leaf in shard.items()} for i in range(3)]
    for number, micro_batch in enumerate(micro_batches):
        with nullcontext() if number == 1 else ddp.no_sync():
            (sum_of_losses(ddp, micro_batch) / 3).backward()


def reduced_in_the_middle_of_a_loop(model: nn.Module, shard: Shard, rank: Rank) -> None:
    for number in range(3):
        micro_batch = {name: leaf[number::3] for name, leaf in shard.items()}
        (sum_of_losses(model, micro_batch) / 3).backward()
        if number == 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= rank.world_size


def warm_up_not_cleared(model: nn.Module, shard: Shard, rank: Rank) -> None:
    sum_of_losses(model, {name: leaf[:2] for name, leaf in shard.items()}).backward()
    ddp = DistributedDataParallel(model)
    sum_of_losses(ddp, shard).backward()


@pytest.mark.parametrize(
    ("step", "shown", "fix"),
    [
        (
            aux_after_ddp,
            ["loss.backward(retain_graph=True)", "aux.backward()"],
            "add the losses and call backward() once",
        ),
        (
            aux_after_reducing_by_hand,
            ["dist.all_reduce(parameter.grad)", "aux.backward()"],
            "before the reduction in line",
        ),
        (
            aux_of_rank_0_only,
            [
                "sum_of_losses(ddp, shard).backward()",
                'model(shard["rows"]).mean().backward()  # of rank 0',
            ],
            "add the losses and call backward() once",
        ),
    ],
)
def test_a_backward_after_the_reduction_is_named(step: Any, shown: list[str], fix: str) -> None:
    verdict = different(CASE, step)
    finding = first_finding(verdict)
    assert finding.cause == "backward_after_reduction", verdict
    assert lines_shown(verdict) == shown, verdict
    assert faulty_lines(verdict) == shown[-1:]
    assert fix in finding.fix


def test_a_backward_of_one_rank_is_told_from_one_of_all() -> None:
    of_one = first_finding(different(CASE, aux_of_rank_0_only))
    of_all = first_finding(different(CASE, aux_after_ddp))
    assert of_one.because.startswith("rank 0 called backward again")
    assert of_all.because.startswith("every rank called backward again")


def test_two_backwards_before_the_reduction_are_right() -> None:
    verdict = check(CASE, aux_before_reducing)
    assert verdict.outcome == "same", verdict


@pytest.mark.parametrize("step", [boundary_off_by_one, reduced_in_the_middle_of_a_loop])
def test_a_later_micro_batch_is_a_wrong_boundary(step: Any) -> None:
    verdict = different(CASE, step)
    assert verdict.cause == "accumulation_boundary_off_by_one", verdict
    assert "backward_after_reduction" not in accepted(verdict)


def test_an_earlier_backward_that_is_not_cleared_has_another_name() -> None:
    verdict = different(CASE, warm_up_not_cleared)
    assert "backward_after_reduction" not in accepted(verdict), verdict
