"""A loss may call collectives: for the big batch they see one process alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Rank, check
from ddp_equivalence.report.script import export
from tests.package.own_cases import build_model, loss, make_batch, own_case, right_step


def global_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Divides by the number of examples on all ranks; DDP divides by the world size again."""
    count = torch.tensor(float(len(batch["rows"])), dtype=batch["rows"].dtype)
    dist.all_reduce(count)
    squares = (model(batch["rows"]) - batch["targets"]).square().sum()
    mean: Tensor = squares / count * dist.get_world_size()
    return mean


def step(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    global_mean(ddp, shard).backward()


def wrong_step(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (global_mean(ddp, shard) / rank.world_size).backward()


def test_a_loss_that_reduces_is_compared_on_uneven_shards_too() -> None:
    groups = set(dist.distributed_c10d._world.pg_map)
    assert check(own_case(loss=global_mean), step).outcome == "same"
    assert check(own_case(loss=global_mean, shards="8+4"), step).outcome == "same"
    assert set(dist.distributed_c10d._world.pg_map) == groups, "the group of one has ended"


def test_a_fault_beside_such_a_loss_is_named() -> None:
    verdict = check(own_case(loss=global_mean, layout="1x3"), wrong_step)
    assert (verdict.outcome, verdict.cause) == ("different", "averaged_twice")


def gathered_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    errors = (model(batch["rows"]) - batch["targets"]).square().sum(1)
    parts = [torch.empty_like(errors) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, errors.detach())
    parts[dist.get_rank()] = errors
    return torch.cat(parts).mean() * dist.get_world_size()


def test_a_loss_that_gathers_is_compared() -> None:
    def gathers(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        gathered_mean(ddp, shard).backward()

    assert check(own_case(loss=gathered_mean), gathers).outcome == "same"


def asks_first(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    value: Tensor = (model(batch["rows"]) - batch["targets"]).square().mean()
    return value.mul(7) if dist.is_initialized() else value


def test_a_loss_that_asks_is_told_that_there_is_no_group() -> None:
    assert check(own_case(loss=asks_first), step_without_collectives).outcome == "same"


def step_without_collectives(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (asks_first(ddp, shard) / 7).backward()


def test_a_process_that_is_in_the_group_of_the_ranks_keeps_it() -> None:
    assert check(own_case(loss=global_mean), step, in_process=True).outcome == "same"
    assert check(own_case(), right_step_in_a_new_group, in_process=True).outcome == "same"
    assert check(own_case(loss=global_mean), step).outcome == "same"


def right_step_in_a_new_group(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model, process_group=dist.new_group([0, 1]))
    loss(ddp, shard).backward()


def test_no_script_is_written_for_such_a_loss(tmp_path: Path) -> None:
    with pytest.raises(BadCase, match="loss is 'global_mean'"):
        export(own_case(loss=global_mean), wrong_step, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_group_of_the_callers_own_is_left_alone() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # no stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    world = dist.group.WORLD
    try:
        assert check(own_case(loss=global_mean), step).outcome == "same"
        assert dist.group.WORLD is world
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
    finally:
        dist.destroy_process_group()


def test_the_builders_of_model_and_batch_get_no_group() -> None:
    def reads_the_rank(generator: torch.Generator) -> Any:
        dist.get_rank()
        return make_batch(generator)

    with pytest.raises(BadCase, match="collectives belong in the step"):
        check(own_case(batch=reads_the_rank, model=build_model), right_step)
