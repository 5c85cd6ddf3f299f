"""Any function can be called on warm ranks, and no later check sees its collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ddp_equivalence import BadCase, Rank, RankFailed, check
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


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(BadCase, match="layout"):
        on_ranks("two", summed, 1)


def test_a_check_on_the_same_ranks_counts_its_own_collectives_only() -> None:
    case = own_case(layout="1x2")
    before = check(case, right_step, backend="gloo").evidence[0].collectives
    on_ranks("1x2", summed, 5)
    after = check(case, right_step, backend="gloo").evidence[0].collectives
    assert before
    assert after == before
