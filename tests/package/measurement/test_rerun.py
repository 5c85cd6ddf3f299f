"""A case that hung or was aborted is run once more, and both outcomes are shown."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Rank, check
from ddp_equivalence.case import settings
from tests.package.own_cases import own_case, right_step


def other_dtype(model: nn.Module, shard: Any, rank: Rank) -> None:
    dtype = torch.float64 if rank.rank == 1 else torch.float32
    dist.all_reduce(torch.zeros(3, dtype=dtype))


def report(step: Any, **options: Any) -> str:
    return " ".join(
        check(own_case(layout="1x3"), step, deadline=3.0, **options).full_report().split()
    )


def test_an_aborted_case_is_explained_by_torch_itself() -> None:
    """Without DETAIL gloo aborts a process that did nothing wrong."""
    text = report(other_dtype)
    assert "killed by SIGABRT" in text or "Timed out" in text
    assert "Rerun on fresh ranks, TORCH_DISTRIBUTED_DEBUG=DETAIL" in text
    assert "the step failed again. rank" in text
    assert "Detected mismatch between collectives on ranks" in text
    assert re.search(r"Doublevs Float|Floatvs Double", text)
    assert "TensorOptions" not in text


def test_a_case_that_does_not_hang_again_says_so(tmp_path: Path) -> None:
    flag = str(tmp_path / "was here")

    def hangs_once(model: nn.Module, shard: Any, rank: Rank) -> None:
        if rank.rank == 0 and not os.path.exists(flag):
            Path(flag).touch()
            time.sleep(1000)
        right_step(model, shard, rank)

    text = report(hangs_once)
    assert "Root cause: rank 0 (node 0, local rank 0) still running" in text
    assert "the step did not fail again; all ranks finished." in text


def sleeps(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 0:
        time.sleep(1000)
    right_step(model, shard, rank)


def test_what_had_no_time_to_finish_is_not_said_to_have_failed_again() -> None:
    text = report(sleeps)
    assert "the step was not done by the rerun's deadline either." in text
    assert "failed again" not in text


def exits(model: nn.Module, shard: Any, rank: Rank) -> None:
    os._exit(1)


def test_a_case_that_ended_otherwise_is_not_run_again() -> None:
    assert "Rerun" not in report(exits)


def test_it_can_be_left_out() -> None:
    with settings.using(settings.Settings(second_look=False)):
        assert "Rerun" not in report(other_dtype)


def test_it_takes_little_longer_than_it_took_to_get_stuck() -> None:
    def hangs(model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)
        time.sleep(1000)

    verdict = check(own_case(), hangs, deadline=5.0)
    assert verdict.second_look is not None
    assert verdict.second_look.failure is not None
    assert verdict.second_look.cut_short
    allowed = re.search(r"within the ([\d.]+) s of", str(verdict.second_look.failure))
    assert allowed is not None, verdict.second_look
    assert float(allowed[1]) < 5.0 / 2


def test_a_right_step_is_right_under_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rerun must not fail by itself: torch 2.13 segfaults there without our help."""
    from ddp_equivalence.measurement.measure import DETAIL

    for name, value in DETAIL:
        monkeypatch.setenv(name, value)
    assert check(own_case(layout="1x3"), right_step).outcome == "same"
