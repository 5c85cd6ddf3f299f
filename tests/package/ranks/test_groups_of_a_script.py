"""A step may start and end its process group, as the main function of a training script does."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.package.own_cases import loss, own_case, right_step


def main(model: nn.Module, shard: Any, factor: float = 1.0) -> None:
    """The end of a script that took both functions out of torch.distributed by name."""
    init_process_group("nccl", "env://")
    ddp = DistributedDataParallel(model)
    (factor * loss(ddp, shard)).backward()
    destroy_process_group()
    assert not dist.is_initialized()


def step_as_a_script(model: nn.Module, shard: Any, rank: Rank) -> None:
    main(model, shard)


def wrong_step_as_a_script(model: nn.Module, shard: Any, rank: Rank) -> None:
    main(model, shard, factor=rank.world_size)


def test_a_step_may_start_and_end_its_group() -> None:
    assert check(own_case(), step_as_a_script).outcome == "same"
    assert check(own_case(), step_as_a_script, steps=2).outcome == "same"
    assert check(own_case(), right_step).outcome == "same"


def test_a_wrong_step_is_watched_although_it_ends_its_group() -> None:
    verdict = check(own_case(), wrong_step_as_a_script)
    assert (verdict.outcome, verdict.cause) == ("different", "sum_not_mean")
    assert verdict.why_not_watched == ""
    assert sorted(verdict.observed) == [0, 1]
    assert verdict.findings[0].lines, verdict


def test_rank_0_in_this_process_may_do_so_too() -> None:
    before = dist.init_process_group, dist.destroy_process_group

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
        right_step(model, shard, rank)
        dist.destroy_process_group()

    assert check(own_case(), step, in_process=True).outcome == "same"
    assert (dist.init_process_group, dist.destroy_process_group) == before


def test_groups_that_the_step_makes_end_with_its_group() -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        dist.init_process_group("gloo")
        pair = dist.new_group([0, 1])
        ddp = DistributedDataParallel(model, process_group=pair)
        loss(ddp, shard).backward()
        del ddp  # before its group: see wrapper_outlives_group in docs/known_defects.md
        dist.destroy_process_group()
        assert pair not in dist.distributed_c10d._world.pg_map

    verdict = check(own_case(), step)
    assert verdict.outcome == "same", verdict


def test_a_group_that_was_ended_may_be_started_again() -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        right_step(model, shard, rank)

    assert check(own_case(), step).outcome == "same"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"world_size": 1, "rank": 0}, "init_process_group(world_size=1) on a rank that has"),
        ({"world_size": 2, "rank": 1}, "init_process_group(rank=1) on a rank that has rank 0"),
    ],
    ids=["one rank", "rank 1"],
)
def test_another_rank_or_number_of_ranks_is_an_error(arguments: Any, says: str) -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        dist.init_process_group("gloo", **arguments)

    verdict = check(own_case(), step)
    assert verdict.outcome == "unknown"
    assert says in " ".join(str(verdict).split())
    assert verdict.failure is not None
    assert "test_groups_of_a_script.py" in str(verdict).split("Root cause")[1].split("| ")[0]
