"""However a rank misbehaves, the report names cause and rank in time, and the next case is right.

The misbehaving rank is the first, a middle or the last one, and each moment of a step has its turn.
With ``MISBEHAVING_RANKS=all`` every rank misbehaves in every way at every moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from ddp_equivalence.ranks.environment import RANK_SET_VARIABLE
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import loss, own_case, right_step
from tests.package.ranks import misbehaviour
from tests.package.ranks.misbehaviour import MISBEHAVIOURS, Misbehaviour

DEADLINE = 3.0
SHORT_DEADLINE = 1.5
"""For misbehaviours that only the deadline ends."""

MARGIN = 10.0
"""Seconds beyond the deadline by which the verdict must be there, on a busy machine too."""

RANKS = (0, 1, 2)


def step_with(name: str, moment: str, misbehaving_rank: int) -> Callable[..., Any]:
    """A correct step, in which one rank misbehaves at one moment."""

    def step(model: nn.Module, shard: Any, rank: Rank) -> Any:
        def reached(current_moment: str) -> Any:
            if current_moment == moment:
                return misbehaviour.act(name, rank.rank == misbehaving_rank, model)
            return None

        reached("construction")
        ddp = DistributedDataParallel(model)
        first_layer = next(model.children())
        first_layer.register_forward_hook(lambda *_: reached("forward"))
        next(model.parameters()).register_hook(lambda _: reached("backward"))

        def average(_: Any, bucket: Any) -> Any:
            reached("collective")
            value = bucket.buffer() / rank.world_size
            return (
                torch.distributed.all_reduce(value, async_op=True)
                .get_future()
                .then(lambda done: done.value()[0])
            )

        average.__annotations__ = {}
        ddp.register_comm_hook(None, average)
        loss(ddp, shard).backward()
        return reached("after")

    return step


def trials() -> list[Any]:
    parameters = []
    for row, one in enumerate(MISBEHAVIOURS.values()):
        every = list(product(one.moments, RANKS))
        chosen = (
            every if os.environ.get("MISBEHAVING_RANKS") == "all" else [every[row % len(every)]]
        )
        parameters += [pytest.param(one, *each, id=f"{one.name}-{each}") for each in chosen]
    return parameters


@pytest.mark.parametrize(("expected", "moment", "rank"), trials())
def test_cause_and_rank_are_named_in_time_and_the_next_case_is_right(
    expected: Misbehaviour, moment: str, rank: int
) -> None:
    case = own_case(layout="1x3")
    assert check(case, right_step).outcome == "same"  # the ranks have started: not timed below
    started = time.monotonic()
    deadline = SHORT_DEADLINE if expected.hangs else DEADLINE
    verdict = check(case, step_with(expected.name, moment, rank), deadline=deadline)
    seconds = time.monotonic() - started
    report = " ".join(str(verdict).split())
    assert verdict.outcome == expected.outcome, report
    assert expected.is_named(report, rank), report
    rerun_seconds = verdict.second_look.seconds if verdict.second_look is not None else 0.0
    assert seconds - rerun_seconds < deadline + MARGIN  # the rerun has a deadline of its own
    assert check(case, right_step).outcome == "same"
    assert not left_behind()


def left_behind() -> list[str]:
    """The processes of ended ranks that still run after some time: killing one takes a moment."""
    until = time.monotonic() + MARGIN
    while (left := processes_of_ended_ranks()) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def processes_of_ended_ranks() -> list[str]:
    """The processes that belong to a rank set of this process which no longer exists."""
    idle_tokens = {rank_set.token for rank_set in warm_ranks().idle()}
    processes = []
    for process in psutil.process_iter():
        try:
            token = process.environ().get(RANK_SET_VARIABLE, "")
        except psutil.Error:
            continue
        # A token begins with the judging process's id: other xdist workers have ranks as well.
        if token.startswith(f"{os.getpid()}-") and token not in idle_tokens:
            processes.append(f"{process.pid} {token}")
    return processes
