"""Any function can be called on warm ranks; each check counts all its own collectives."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Rank, RankFailed, check
from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.package.own_cases import own_case, right_step


def summed(rank: Rank, times: int) -> tuple[int, float]:
    total = torch.ones(3)
    for _ in range(times):
        dist.all_reduce(total)
    return rank.rank, float(total[0])


def fails_on_rank_1(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("no such file: rows.csv")


def test_results_are_in_the_order_of_the_ranks() -> None:
    assert on_ranks("1+2", summed, 1) == ((0, 3.0), (1, 3.0), (2, 3.0))


def test_a_rank_that_raises_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 .*no such file: rows\.csv"):
        on_ranks("1x2", fails_on_rank_1)


def test_a_check_on_the_same_ranks_counts_its_own_collectives_only() -> None:
    case = own_case(layout="1x2")
    before = check(case, right_step, backend="gloo").evidence[0].collectives
    on_ranks("1x2", summed, 5)
    after = check(case, right_step, backend="gloo").evidence[0].collectives
    assert before
    assert after == before


def calls_100_barriers(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    for _ in range(100):
        dist.barrier()


def test_more_collectives_than_the_recorder_holds_are_counted() -> None:
    """DDP's all_reduce is among the forgotten ones. That must not count as none at all."""
    verdict = check(own_case(), calls_100_barriers)
    assert verdict.outcome == "same"
    said = " ".join(str(verdict).split())
    counts = re.search(r"rank 0 issued (\d+) \w+ .* \(and (\d+) earlier ones", said)
    assert counts is not None
    assert int(counts[1]) + int(counts[2]) == 104
    said = " ".join(str(check(own_case(), right_step)).split())
    assert "1 all_reduce of 66 elements" in said
    assert "earlier ones" not in said
