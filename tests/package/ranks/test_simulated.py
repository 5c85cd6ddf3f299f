"""Simulated ranks take turns, keep what a process has to itself, and show who waits for whom."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.collectives import of_the_suite
from ddp_equivalence.ranks.simulated import SimulatedRankFailed, SimulatedWorld
from ddp_equivalence.ranks.warm_ranks import on_ranks


def in_a_world(rank: Rank, layout: str, work: Callable[[Rank], Any]) -> tuple[Any, Any]:
    """What each simulated rank returns, and the collectives; or why they failed, and their rank."""
    group = dist.group.WORLD
    world = SimulatedWorld[Any](parse(layout))
    try:
        found: tuple[Any, Any] = world.run(work), dict(world.collectives)
    except SimulatedRankFailed as failure:
        found = str(failure), failure.rank
    assert dist.group.WORLD is group  # this process has its own group again
    return found


def simulated(layout: str, work: Callable[[Rank], Any]) -> tuple[Any, Any]:
    ((found, more),) = on_ranks("1x1", in_a_world, layout, work)
    return found, more


def who_am_i(rank: Rank) -> tuple[int, ...]:
    dist.barrier()
    return (
        dist.get_rank(),
        dist.get_world_size(),
        int(os.environ["RANK"]),
        int(os.environ["LOCAL_RANK"]),
        rank.node,
    )


def draws(rank: Rank) -> list[float]:
    torch.manual_seed(rank.rank)
    random.seed(rank.rank)
    np.random.seed(rank.rank)
    found = []
    for _ in range(2):
        dist.barrier()  # the others draw meanwhile
        found += [torch.rand(()).item(), random.random(), float(np.random.rand())]
    return found


def draws_alone(rank: int) -> list[float]:
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    return [
        one
        for _ in range(2)
        for one in (torch.rand(()).item(), random.random(), float(np.random.rand()))
    ]


def collectives(rank: Rank) -> list[list[float]]:
    """The result of every collective, on values that tell all ranks apart."""
    mine, world = torch.tensor([rank.rank + 1.0, 10.0 * rank.rank]), rank.world_size
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        total = mine.clone()
        dist.all_reduce(total, op=op)
        results.append(total)
    several = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(several, mine)
    whole = torch.zeros(2 * world)
    dist.all_gather_into_tensor(whole, mine)
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * world) * (rank.rank + 1))
    other = torch.zeros(1)
    pieces = [torch.tensor([float(10 * rank.rank + to)]) for to in range(world)]
    dist.reduce_scatter(other, [one.clone() for one in pieces])
    swapped = [torch.zeros(1) for _ in range(world)]
    dist.all_to_all(swapped, pieces)
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    reduced = mine.clone()
    dist.reduce(reduced, dst=2)
    gathered = [torch.zeros(2) for _ in range(world)] if rank.rank == 1 else None
    dist.gather(mine, gathered, dst=1)
    dealt = torch.zeros(1)
    dist.scatter(dealt, pieces if rank.rank == 1 else None, src=1)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank.rank})
    results += [*several, whole, part, other, *swapped, sent, dealt, *(gathered or ())]
    results += [reduced] if rank.rank == 2 else []
    return [one.tolist() for one in results] + [[float(one["rank"]) for one in objects]]


def pairs(rank: Rank) -> float:
    """Each pair of neighbours has a group; the two ranks of a pair swap a number as well."""
    groups = [dist.new_group([2 * n, 2 * n + 1], backend="gloo") for n in range(2)]
    mine = torch.tensor([float(rank.rank)])
    dist.all_reduce(mine, group=groups[rank.rank // 2])
    got, neighbour = torch.zeros(1), rank.rank ^ 1
    waits: list[Any] = [dist.irecv(got, neighbour), dist.isend(mine * (rank.rank + 1), neighbour)]
    for one in waits:
        one.wait()
    return float(got)


def starts_like_a_script(rank: Rank) -> float:
    from ddp_equivalence.ranks.process_state import as_a_script_has_them

    with as_a_script_has_them(rank):
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        model(torch.tensor([[float(rank.rank)]])).sum().backward()
        dist.destroy_process_group()
        assert not dist.is_initialized()
    assert dist.is_initialized()
    gradient: Tensor = model.module.weight.grad
    return float(gradient)


def leaves_early(rank: Rank) -> None:
    if rank.rank != 2:
        dist.all_reduce(torch.ones(1))


def in_another_order(rank: Rank) -> None:
    tensors = [torch.ones(3), torch.ones(5)]
    for one in tensors if rank.rank else tensors[::-1]:
        dist.all_reduce(one)


def raises_on_rank_1(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("no such file: rows.csv")
    dist.barrier()


def one_of_the_step(rank: Rank) -> None:
    dist.all_reduce(torch.ones(7))
    with of_the_suite():
        dist.all_reduce(torch.ones(9))


def scattered_maximum(rank: Rank) -> float:
    part = torch.zeros(1)
    given = torch.arange(float(rank.world_size)) * (rank.rank + 1)
    dist.reduce_scatter_tensor(part, given, op=dist.ReduceOp.MAX)
    return float(part)


def from_another_root(rank: Rank) -> None:
    dist.broadcast(torch.ones(2), src=rank.rank)


def barrier_or_sum(rank: Rank) -> None:
    if rank.rank == 0:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))


def swallows_errors(rank: Rank) -> None:
    with suppress(Exception):
        dist.all_reduce(torch.ones(3 if rank.rank else 4))
    dist.barrier()


def asks_until_it_is_here(rank: Rank) -> float:
    got, neighbour = torch.zeros(1), (rank.rank + 1) % rank.world_size
    expected: Any = dist.irecv(got, (rank.rank - 1) % rank.world_size)
    if rank.rank:
        dist.isend(torch.tensor([float(rank.rank)]), neighbour)
    while rank.rank != 1 and not expected.is_completed():
        pass
    if rank.rank == 0:
        dist.isend(torch.tensor([10.0]), neighbour)
    expected.wait()
    return float(got)


def forgets_its_rank(rank: Rank) -> str | None:
    if rank.rank == 1:
        del os.environ["RANK"]
        torch.set_default_dtype(torch.float64)
    dist.barrier()
    return f"{os.environ.get('RANK')} {torch.ones(1).dtype}"


def test_each_rank_has_its_own_number_variables_and_node() -> None:
    found, _ = simulated("2x2", who_am_i)
    assert found == [(0, 4, 0, 0, 0), (1, 4, 1, 1, 0), (2, 4, 2, 0, 1), (3, 4, 3, 1, 1)]


def test_each_rank_draws_as_a_process_of_its_own() -> None:
    found, _ = simulated("1x3", draws)
    assert found == [draws_alone(rank) for rank in range(3)]


def test_every_collective_gives_what_gloo_gives() -> None:
    """But for the mean, which gloo lacks."""
    found, issued = simulated("1x4", collectives)
    mean = [2.5, 15.0]
    assert [ours[1] for ours in found] == [mean] * 4
    assert tuple(found) == on_ranks("1x4", collectives_of_gloo)
    names = {one.operation for one in issued}
    assert names >= {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"}


def collectives_of_gloo(rank: Rank) -> list[list[float]]:
    own: Any = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        own(tensor, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op)
        if op == dist.ReduceOp.AVG:
            tensor /= rank.world_size

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        return collectives(rank)
    finally:
        dist.all_reduce = own


def test_groups_and_messages_of_some_ranks() -> None:
    found, issued = simulated("1x4", pairs)
    assert found == [2.0, 1.0, 20.0, 15.0]
    assert {one.ranks for one in issued if one.operation == "all_reduce"} == {(0, 1), (2, 3)}


def test_a_step_may_start_and_end_its_group_as_a_script_does() -> None:
    assert simulated("1x3", starts_like_a_script)[0] == [1.0, 1.0, 1.0]


def test_a_rank_that_ends_early_is_named() -> None:
    failure, rank = simulated("1x3", leaves_early)
    assert rank is None
    assert "the ranks wait for ever: ranks 0 to 1 for rank 2 in all_reduce" in failure
    assert "test_simulated.py:" in failure
    assert failure.endswith("rank 2 ended")


def test_ranks_in_different_collectives_are_named() -> None:
    failure, _ = simulated("1x3", in_another_order)
    assert "rank 0 in all_reduce SUM of [5] float32 at test_simulated.py:" in failure
    assert "ranks 1 to 2 in all_reduce SUM of [3] float32" in failure


def test_a_maximum_is_scattered_as_one() -> None:
    assert simulated("1x3", scattered_maximum)[0] == [0.0, 3.0, 6.0]


@pytest.mark.parametrize("work", [from_another_root, barrier_or_sum, swallows_errors])
def test_ranks_that_differ_in_root_or_kind_fail_whatever_they_catch(work: Any) -> None:
    assert "in different collectives" in simulated("1x3", work)[0]


def test_a_rank_that_asks_again_and_again_lets_the_others_run() -> None:
    assert simulated("1x3", asks_until_it_is_here)[0] == [2.0, 10.0, 1.0]


def test_what_a_rank_deletes_or_sets_is_its_own() -> None:
    found, _ = simulated("1x3", forgets_its_rank)
    assert found == ["0 torch.float32", "None torch.float64", "2 torch.float32"]


def test_a_rank_that_raises_is_named_with_its_line() -> None:
    failure, rank = simulated("1x3", raises_on_rank_1)
    assert rank == 1
    assert failure.startswith("ValueError: no such file: rows.csv at ")
    assert "test_simulated.py:" in failure


@pytest.mark.parametrize("layout", ["1x2", "8x8"])
def test_a_collective_of_the_step_is_counted_once_for_all_its_ranks(layout: str) -> None:
    _, issued = simulated(layout, one_of_the_step)
    ((one, count),) = issued.items()
    assert (one.operation, one.reduction, one.elements, count) == ("all_reduce", "SUM", 7, 1)
    assert one.ranks == tuple(range(parse(layout).world_size))
