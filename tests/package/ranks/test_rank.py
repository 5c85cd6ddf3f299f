"""A step may use its rank as the number that it has in a training script."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Rank, check
from tests.package.own_cases import own_case, right_step


@pytest.fixture
def rank() -> Rank:
    return Rank(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node=1,
        nodes=2,
        device=torch.device("cpu"),
        backend="gloo",
    )


def test_a_rank_is_its_number(rank: Rank) -> None:
    assert rank == 3
    assert rank != 0
    assert rank in (1, 3)
    assert hash(rank) == hash(3)
    assert {3: "last"}[rank] == "last"
    assert rank > 2
    assert rank % 2 == 1
    assert (rank + 1) % rank.world_size == 0
    assert torch.arange(4)[rank] == 3
    assert list(range(rank)) == [0, 1, 2]
    assert f"rank {rank}, {rank:02d}" == "rank 3, 03"


def test_a_rank_keeps_its_fields_and_shows_them(rank: Rank) -> None:
    copied = pickle.loads(pickle.dumps(rank))
    assert (copied, copied.rank, copied.node, copied.backend) == (3, 3, 1, "gloo")
    assert repr(copied) == repr(rank)
    assert repr(rank).startswith("Rank(rank=3, world_size=4, local_rank=1,")


def only_rank_0_prints(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    if rank == 0:
        print("this is the first rank")
    dist.broadcast(torch.zeros(1), src=rank * 0)


def test_a_step_that_compares_its_rank_with_a_number_takes_the_right_branch() -> None:
    verdict = check(own_case(), only_rank_0_prints)
    assert verdict.outcome == "same", str(verdict)
    assert dict(verdict.output) == {0: "this is the first rank\n", 1: ""}
