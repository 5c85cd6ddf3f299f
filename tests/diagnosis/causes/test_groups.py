"""Gradients that are reduced in groups of ranks which nothing joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.diagnosis.causes.named import (
    accepted,
    case_of,
    different,
    faulty_lines,
    first_finding,
    lines_shown,
    loss,
)

Shard = dict[str, Tensor]


def own_group(of_every_rank: list[list[int]], rank: int) -> Any:
    """Make all groups, and return the one with this rank."""
    mine = None
    for ranks in of_every_rank:
        group = dist.new_group(ranks)
        mine = group if rank in ranks else mine
    return mine


def average_over_node(model: nn.Module, shard: Shard, rank: Rank) -> None:
    group = own_group([[0, 1], [2, 3]], rank.rank)
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)  # in its node only
        parameter.grad /= 2


def average_with_itself(model: nn.Module, shard: Shard, rank: Rank) -> None:
    group = own_group([[0], [1], [2], [3]], rank.rank)
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)  # in a group of one


def ddp_of_its_node(model: nn.Module, shard: Shard, rank: Rank) -> None:
    group = own_group([[0, 1], [2, 3]], rank.rank)
    ddp = DistributedDataParallel(model, process_group=group)  # of some ranks
    loss(ddp, shard).backward()


def ddp_of_equal_local_ranks(model: nn.Module, shard: Shard, rank: Rank) -> None:
    group = own_group([[0, 2], [1, 3]], rank.rank)
    ddp = DistributedDataParallel(model, process_group=group)  # of some ranks
    loss(ddp, shard).backward()


def ddp_of_its_node_and_a_mean_between_nodes(model: nn.Module, shard: Shard, rank: Rank) -> None:
    group = own_group([[0, 1], [2, 3]], rank.rank)
    between = own_group([[0, 2], [1, 3]], rank.rank)
    ddp = DistributedDataParallel(model, process_group=group)
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=between)
        parameter.grad /= 2


def average_within_and_between_nodes(model: nn.Module, shard: Shard, rank: Rank) -> None:
    in_node = own_group([[0, 1], [2, 3]], rank.rank)
    between = own_group([[0, 2], [1, 3]], rank.rank)
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=in_node)
        dist.all_reduce(parameter.grad, group=between)
        parameter.grad /= 4


def sum_within_and_between_nodes(model: nn.Module, shard: Shard, rank: Rank) -> None:
    in_node = own_group([[0, 1], [2, 3]], rank.rank)
    between = own_group([[0, 2], [1, 3]], rank.rank)
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=in_node)
        dist.all_reduce(parameter.grad, group=between)


def without_the_last_rank(model: nn.Module, shard: Shard, rank: Rank) -> None:
    group = own_group([[0, 1, 2]], rank.rank)
    loss(model, shard).backward()
    if rank.rank == 3:
        return
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= 3


@pytest.mark.parametrize(
    ("step", "text", "groups"),
    [
        (average_over_node, "in its node only", "{0, 1} and {2, 3}"),
        (average_with_itself, "in a group of one", "{0}, {1}, {2} and 1 more"),
    ],
)
def test_groups_that_nothing_joins_are_named_with_their_reduction(
    step: Any, text: str, groups: str
) -> None:
    verdict = different(case_of(), step)
    finding = first_finding(verdict)
    assert finding.cause == "reduced_in_wrong_group", verdict
    assert faulty_lines(verdict) == [f"dist.all_reduce(parameter.grad, group=group)  # {text}"], (
        verdict
    )
    assert lines_shown(verdict)[0] == "group = dist.new_group(ranks)"
    assert groups in finding.because
    assert finding.fix == "all_reduce over all 4 ranks, and divide by 4."


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (ddp_of_its_node, "nodes_not_reduced"),
        (ddp_of_equal_local_ranks, "reduced_in_wrong_group"),
    ],
)
def test_a_group_that_ddp_is_given_is_named_by_whether_it_is_the_node(
    step: Any, cause: str
) -> None:
    verdict = different(case_of(), step)
    finding = first_finding(verdict)
    assert accepted(verdict) == {cause}, verdict
    assert faulty_lines(verdict) == [
        "ddp = DistributedDataParallel(model, process_group=group)  # of some ranks"
    ], verdict
    assert finding.fix.startswith("give DistributedDataParallel no process_group")


@pytest.mark.ddp(second_look=False)
def test_without_a_second_run_the_means_of_nodes_are_named_by_their_numbers() -> None:
    verdict = different(case_of(), average_over_node)
    assert accepted(verdict) == {"nodes_not_reduced"}, verdict
    assert first_finding(verdict).because == ""


@pytest.mark.parametrize(
    "step", [average_within_and_between_nodes, ddp_of_its_node_and_a_mean_between_nodes]
)
def test_a_mean_within_nodes_and_then_between_them_is_right(step: Any) -> None:
    verdict = check(case_of(), step)
    assert verdict.outcome == "same", verdict


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (sum_within_and_between_nodes, "sum_not_mean"),
        (without_the_last_rank, "rank_left_out"),
    ],
)
def test_groups_that_are_joined_and_a_rank_in_no_group_have_other_names(
    step: Any, cause: str
) -> None:
    verdict = different(case_of(), step)
    assert first_finding(verdict).cause == cause, verdict
    assert "reduced_in_wrong_group" not in accepted(verdict)
