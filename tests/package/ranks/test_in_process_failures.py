"""If another rank fails or never comes, rank 0 in this process does not wait for it for ever."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import loss, own_case, right_step

SOON = 120.0
"""Seconds that no test here takes, unless rank 0 still waits. Most of them take about 2 s."""

DEADLINE = 4 * SOON
"""Rank 0 would wait for half of this, if nothing but the deadline ended its wait."""


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell that starts pytest in the background lets it ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def next_check_works_in_both_ways() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON
    for in_process in (True, False):
        assert check(own_case(), right_step, in_process=in_process).outcome == "same"
    warm_ranks().stop()
    assert not dist.is_initialized()


def raises(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("only on rank 1")
    right_step(model, shard, rank)


def raises_at_the_end(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    if rank.rank == 1:
        raise ValueError("only on rank 1")


def exits(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        os._exit(7)
    right_step(model, shard, rank)


def is_killed(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (raises, "ValueError: only on rank 1"),
        (raises_at_the_end, "ValueError: only on rank 1"),
        (exits, "ended without a result, exit code 7"),
        (is_killed, "killed by SIGKILL"),
    ],
    ids=["raises", "raises at the end", "exits", "is killed"],
)
def test_a_failure_of_another_rank_is_the_root_cause(step: Any, message: str) -> None:
    verdict = check(own_case(), step, in_process=True, deadline=DEADLINE)
    assert verdict.outcome == "unknown"
    text = " ".join(str(verdict).split())
    assert f"Root cause: rank 1 (node 0, local rank 1) {message}" in text


def returns_early(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 0:
        dist.all_reduce(torch.zeros(3))


def test_ranks_that_have_finished_are_not_waited_for_longer_than_a_collective_may_take() -> None:
    verdict = check(
        own_case(), returns_early, in_process=True, deadline=DEADLINE, collective_deadline=1.5
    )
    text = " ".join(str(verdict).split())
    assert verdict.outcome == "unknown"
    assert "Rank 0 waits in all_reduce #1 of (3,) Float, for rank 1, which has finished" in text


def thinks_for_long(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    if rank.rank == 0:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            time.sleep(0.01)


def test_rank_0_may_take_its_time_in_python_after_the_others_have_finished() -> None:
    started = warm_ranks().started
    for step in (thinks_for_long, right_step):
        verdict = check(own_case(), step, in_process=True, collective_deadline=0.5)
        assert verdict.outcome == "same"
    assert warm_ranks().started == started + 1  # the other ranks were not killed


def never_comes(number: int, model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 waits for rank 1, and then gets the signal."""
    ddp = DistributedDataParallel(model)
    if rank.rank == 1:
        time.sleep(1000)
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    loss(ddp, shard).backward()


def never_comes_while_rank_0_computes(
    number: int, model: nn.Module, shard: Any, rank: Rank
) -> None:
    """Rank 0 gets the signal while backward still computes, and then waits for rank 1."""
    ddp = DistributedDataParallel(model)
    if rank.rank == 1:
        time.sleep(1000)
    matrix = torch.ones(1000, 1000, dtype=torch.float64, requires_grad=True)
    long = matrix
    for _ in range(8):
        long = long @ matrix
    value = loss(ddp, shard) + 0 * long.sum()
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
    value.backward()


class Alarm(Exception):
    """What the handler of a timeout raises, as that of pytest-timeout does."""


@pytest.mark.parametrize(
    ("step", "number", "error"),
    [
        (never_comes, signal.SIGINT, KeyboardInterrupt),
        (never_comes, signal.SIGALRM, Alarm),
        (never_comes_while_rank_0_computes, signal.SIGINT, KeyboardInterrupt),
    ],
    ids=["Ctrl-C", "an alarm", "Ctrl-C before it waits"],
)
def test_a_signal_ends_a_collective_in_which_rank_0_waits(
    step: Callable[..., None], number: signal.Signals, error: type[BaseException]
) -> None:
    def on_alarm(*_: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with pytest.raises(error):
            check(
                own_case(),
                partial(step, number),
                in_process=True,
                deadline=DEADLINE,
                collective_deadline=3.0,
            )
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupts_itself() -> None:
    _thread.interrupt_main()
    time.sleep(0.5)


def is_interrupted(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 catches Ctrl-C, as a debugger does, and goes on."""
    if rank.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            interrupts_itself()
        time.sleep(0.5)
    right_step(model, shard, rank)


def test_a_signal_that_rank_0_handles_itself_changes_nothing() -> None:
    assert check(own_case(), is_interrupted, in_process=True).outcome == "same"


def wrong_on_rank_0(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 0:
        raise RuntimeError("Connection closed by peer, says my own code")
    right_step(model, shard, rank)


def test_an_exception_of_rank_0_that_looks_like_a_lost_connection_is_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="says my own code"):
        check(own_case(), wrong_on_rank_0, in_process=True)
