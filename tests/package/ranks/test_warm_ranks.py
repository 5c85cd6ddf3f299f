"""Ranks are kept for the next case, replaced when needed, and gone after the run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.lanes import choose
from ddp_equivalence.ranks.warm_ranks import WarmRanks, warm_ranks
from tests.package.own_cases import loss, own_case, right_step


def prints_its_process_id(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(os.getpid())
    right_step(model, shard, rank)


def alive(process_ids: Any) -> list[int]:
    return [pid for pid in process_ids if psutil.pid_exists(pid)]


@pytest.mark.usefixtures("as_if_alone")
def test_ranks_are_used_again_and_fresh_ones_are_new() -> None:
    process_ids: list[tuple[int, ...]] = []
    for fresh in (False, False, True, False):
        verdict = check(own_case(), prints_its_process_id, fresh_ranks=fresh)
        process_ids.append(tuple(int(verdict.output[rank]) for rank in (0, 1)))
    assert process_ids[0] == process_ids[1] == process_ids[3]
    assert not set(process_ids[0]) & set(process_ids[2])
    assert not alive(process_ids[2])


def test_ranks_leave_no_process_behind_and_make_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks = WarmRanks()
    layout = parse("1x2")
    with ranks.acquire(layout, choose(layout, "gloo"), 30.0) as rank_set:
        process_ids = rank_set.process_ids()
        assert alive(process_ids)
        assert not list(tmp_path.glob("ddp_equivalence-*"))
    ranks.stop()
    assert not alive(process_ids)


@pytest.mark.usefixtures("as_if_alone")
def test_the_ranks_that_were_idle_longest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_equivalence.ranks.warm_ranks.MAX_IDLE_RANKS", 3)
    before = warm_ranks().started
    for layout in ("1x2", "1x2", "2x1", "1x2"):
        assert check(own_case(layout=layout), right_step).outcome == "same"
    assert warm_ranks().started - before == 3


def test_a_rank_that_has_died_while_idle_is_replaced() -> None:
    verdict = check(own_case(), prints_its_process_id)
    pid = int(verdict.output[1])
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.01)
    verdict = check(own_case(), prints_its_process_id)
    assert verdict.outcome == "same", str(verdict)
    assert int(verdict.output[1]) != pid


def makes_a_group(model: nn.Module, shard: Any, rank: Rank) -> None:
    all_ranks = dist.new_group()
    ddp = DistributedDataParallel(model, process_group=all_ranks)
    loss(ddp, shard).backward()


@pytest.mark.usefixtures("as_if_alone")
def test_groups_that_a_step_makes_end_with_its_ranks() -> None:
    assert check(own_case(), right_step).outcome == "same"
    started = warm_ranks().started
    assert check(own_case(), makes_a_group).outcome == "same"
    assert check(own_case(), right_step).outcome == "same"
    assert warm_ranks().started == started + 1


@pytest.mark.usefixtures("as_if_alone")
def test_groups_of_the_catalogue_are_made_once() -> None:
    case = Case(model="mlp", loss="mse_mean", layout="2x2")
    assert check(case, "hybrid").outcome == "same"
    started = warm_ranks().started
    for _ in range(3):
        assert check(case, "hybrid").outcome == "same"
    assert warm_ranks().started == started
