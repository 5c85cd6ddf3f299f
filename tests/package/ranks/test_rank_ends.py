"""However a rank ends its work, the report names it, the next case is right, and nothing hangs."""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, RankFailed, assert_equivalent, check
from ddp_equivalence.ranks.process import do_next_work
from tests.package.own_cases import loss, own_case, right_step


def raises(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("no such thing")
    right_step(model, shard, rank)


def test_a_rank_that_raises_is_the_root_cause_and_the_next_case_is_right() -> None:
    with pytest.raises(RankFailed) as caught:
        assert_equivalent(own_case(layout="1+2", shards="equal"), raises, deadline=20)
    ends = caught.value.ends
    assert sorted(end.rank for end in ends) == [0, 1, 2]
    assert (ends[0].rank, ends[0].node, ends[0].local_rank) == (1, 1, 0)
    assert ends[0].what.startswith("ValueError: no such thing")
    text = str(caught.value)
    assert "Root cause: rank 1 (node 1, local rank 0) ValueError: no such thing" in text
    assert "Not compared: a rank failed. This says nothing about equivalence." in text
    assert check(own_case(layout="1+2"), right_step).outcome == "same"


def hangs_in_the_middle_of_a_message(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Announce a message of 1,000 bytes in four bytes, as multiprocessing does, but send one."""
    right_step(model, shard, rank)
    frame = sys._getframe()
    while frame.f_code.co_name != do_next_work.__name__:
        assert frame.f_back is not None
        frame = frame.f_back
    if rank.rank == 1:
        os.write(frame.f_locals["connection"].fileno(), struct.pack("!i", 1000) + b"x")
        time.sleep(1000)


def test_a_rank_that_hangs_in_the_middle_of_a_message_does_not_hang_the_judging_process() -> None:
    started = time.monotonic()
    verdict = check(own_case(), hangs_in_the_middle_of_a_message, deadline=2)
    assert time.monotonic() - started < 30
    assert "Root cause: rank 1 (node 0, local rank 1) still running" in str(verdict)
    assert check(own_case(), right_step).outcome == "same"


def test_the_source_line_of_a_failure_is_named() -> None:
    verdict = check(own_case(), raises)
    assert verdict.failure is not None
    assert 'raise ValueError("no such thing")' in verdict.failure.ends[0].line
    assert Path(__file__).name in verdict.failure.ends[0].line


def keeps_its_wrapper(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    torch.kept = ddp  # type: ignore[attr-defined]  # outlives the case
    loss(ddp, shard).backward()


def test_a_wrapper_that_outlives_its_case_does_not_hang_the_rank_when_it_stops() -> None:
    assert check(own_case(), keeps_its_wrapper, fresh_ranks=True).outcome == "same"
