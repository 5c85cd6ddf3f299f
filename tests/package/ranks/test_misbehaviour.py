"""Whatever a rank does, the case is red with the right cause and rank, in time, and the next is
right.

One row a fault, one column a moment, at the first, a middle and the last rank. ``pytest
tests/suite/test_fault_table.py`` takes every fault at every moment, the ranks in turn; with
``FAULT_TABLE=all`` at every rank. The table is printed at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from ddp_equivalence.ranks.environment import OF_SET
from tests.package.own_cases import loss, own_case, right_step
from tests.package.ranks import misbehaviour
from tests.package.ranks.misbehaviour import FAULTS, MOMENTS, Fault
from tests.package.ranks.misbehaviour_table import FAULT

DEADLINE = 3.0
SHORT_DEADLINE = 1.5
"""Where nothing but the deadline ends the case."""

MORE = 10.0
"""Seconds beyond the deadline by which the verdict is there, on a machine with other work too."""

PLACES = (0, 1, 2)


def step_with(fault: str, moment: str, place: int) -> Callable[..., Any]:
    """A right step in which the rank at ``place`` misbehaves at ``moment``."""

    def step(model: nn.Module, shard: Any, rank: Rank) -> Any:
        def now(here: str) -> Any:
            if here == moment:
                return misbehaviour.act(fault, rank.rank == place, rank, model)
            return None

        now("construction")
        ddp = DistributedDataParallel(model)
        first = next(model.children())
        first.register_forward_hook(lambda *_: now("forward"))
        next(model.parameters()).register_hook(lambda _: now("backward"))

        def reduce(_: Any, bucket: Any) -> Any:
            now("collective")
            value = bucket.buffer() / rank.world_size
            return (
                torch.distributed.all_reduce(value, async_op=True)
                .get_future()
                .then(lambda done: done.value()[0])
            )

        reduce.__annotations__ = {}
        ddp.register_comm_hook(None, reduce)
        loss(ddp, shard).backward()
        return now("after")

    return step


def trials() -> list[Any]:
    found = []
    for row, fault in enumerate(FAULTS.values()):
        for column, moment in enumerate(MOMENTS):
            if moment not in fault.moments:
                continue
            turn = (PLACES[(row + column) % len(PLACES)],)
            for place in PLACES if os.environ.get("FAULT_TABLE") == "all" else turn:
                found.append(
                    pytest.param(fault, moment, place, id=f"{fault.name}-{moment}-{place}")
                )
    return found


@pytest.mark.parametrize(("fault", "moment", "place"), trials())
def test_the_cause_and_the_rank_are_named_in_time_and_the_next_case_is_right(
    fault: Fault, moment: str, place: int, record_property: Callable[[str, object], None]
) -> None:
    case = own_case(layout="1x3")
    assert check(case, right_step).outcome == "same"  # ranks are there: only the fault takes time
    started = time.monotonic()
    deadline = SHORT_DEADLINE if fault.hangs else DEADLINE
    verdict = check(case, step_with(fault.name, moment, place), deadline=deadline)
    seconds = time.monotonic() - started
    text = " ".join(str(verdict).split())
    record_property(FAULT, (fault.name, moment, place, round(seconds, 1)))
    assert verdict.outcome == fault.outcome, text
    assert fault.is_named(text, place), text
    again = verdict.second_look.seconds if verdict.second_look is not None else 0.0
    assert seconds - again < deadline + MORE  # the second look has a deadline of its own
    assert check(case, right_step).outcome == "same"
    assert not left_behind()


def left_behind() -> list[str]:
    """What is still there some time after: a process that is killed does not end at once."""
    until = time.monotonic() + MORE
    while (found := processes_of_ended_ranks()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def processes_of_ended_ranks() -> list[str]:
    """What ranks have started is gone with them: processes that are marked but are no ranks."""
    from ddp_equivalence.ranks.warm_ranks import warm_ranks

    alive = {rank_set._token for rank_set in warm_ranks()._idle.values()}
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        marks = [one.decode() for one in variables if one.startswith(OF_SET.encode())]
        token = marks[0].partition("=")[2] if marks else ""
        # Other workers of the run have ranks of their own.
        if token.startswith(f"{os.getpid()}-") and token not in alive:
            found.append(f"{entry.parent.name} {marks[0]}")
    return found
