"""A rank that failed by itself is the root cause, not the ranks that waited for it."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Rank, RanksTimedOut, check
from tests.package.own_cases import own_case, right_step

OWN_ERRORS = (
    TimeoutError("timed out"),
    RuntimeError("DataLoader timed out after 5 seconds"),
    BrokenPipeError(32, "Broken pipe"),
    ConnectionResetError(104, "Connection reset by peer"),
)


@pytest.mark.parametrize("error", OWN_ERRORS, ids=lambda error: type(error).__name__)
def test_a_timeout_of_the_users_code_is_not_a_wait_for_another_rank(error: Exception) -> None:
    def raises(model: nn.Module, shard: Any, rank: Rank) -> None:
        dist.all_reduce(torch.zeros(2))
        if rank.rank == 0:
            raise error
        right_step(model, shard, rank)

    verdict = check(own_case(), raises, deadline=20.0)
    text = " ".join(str(verdict).split())
    assert f"Root cause: rank 0 (node 0, local rank 0) {type(error).__name__}" in text
    assert "Rank 1 waits in" in text
    assert "for rank 0, which raised" in text
    assert "Rerun" not in text


def ended_by_the_watchdog(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Do what NCCL's watchdog does to a rank that waits: print its message and abort."""
    if rank.rank == 2:
        time.sleep(1000)
    os.write(2, b"[PG ID 0 Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)\n")
    os.abort()


def test_a_rank_that_the_watchdog_of_nccl_has_ended_is_not_the_root_cause() -> None:
    verdict = check(own_case(layout="1x3"), ended_by_the_watchdog, deadline=3.0)
    assert isinstance(verdict.failure, RanksTimedOut)
    assert verdict.failure.ends[0].rank == 2
    text = " ".join(str(verdict).split())
    assert "Root cause: rank 2 (node 0, local rank 2) still running" in text
    assert "Then: ranks 0, 1 killed by SIGABRT by NCCL's watchdog: its collective timed out" in text


def never_comes(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        time.sleep(1000)
    right_step(model, shard, rank)


@pytest.mark.parametrize(
    ("deadline", "message"),
    [
        (1.5, "ranks 1, 0 did not come back within the 1.5 s of the deadline"),
        (2.5, "ranks 1, 0 did not come back within 1 s of the first failure"),
    ],
)
def test_a_timeout_says_which_time_was_over(deadline: float, message: str) -> None:
    verdict = check(own_case(), never_comes, deadline=deadline, collective_deadline=1.0)
    assert str(verdict.failure) == message


def test_joining_the_group_has_a_deadline_of_its_own() -> None:
    """GPUs and many ranks take seconds to connect, longer than a collective may take."""

    def calls_no_collective(model: nn.Module, shard: Any, rank: Rank) -> None:
        assert dist.get_world_size() == 4
        model(shard["rows"]).sum().backward()

    case = own_case(layout="1x4")
    verdict = check(
        case, calls_no_collective, deadline=20.0, collective_deadline=0.001, fresh_ranks=True
    )
    assert verdict.failure is None, str(verdict)


def test_the_collectives_deadline_holds_after_joining() -> None:
    def waits(model: nn.Module, shard: Any, rank: Rank) -> None:
        if rank.rank == 0:
            dist.all_reduce(torch.zeros(3))
        time.sleep(1000)

    verdict = check(own_case(), waits, deadline=6.0, collective_deadline=0.5, fresh_ranks=True)
    assert verdict.failure is not None
    assert "Timed out waiting 500ms" in verdict.full_report()
