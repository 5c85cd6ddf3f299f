"""A collective, a case and the run each have a deadline, and the report says who missed it."""

from __future__ import annotations

import re
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import BadCase, Rank, Verdict, check
from ddp_equivalence.case import settings
from ddp_equivalence.pytest_plugin.options import END, RunDeadline
from tests.package.own_cases import own_case, right_step, the_others_wait_for
from tests.package.pytest_plugin.test_pytest_plugin import THEIR_TEST
from tests.package.someone_elses_run import run

SHORT = settings.Settings(deadline=30.0, collective_deadline=2.0, second_look=False)
"""The time of a collective begins when a rank waits in it, however late the ranks come so far."""


def rank_1_is_elsewhere(model: nn.Module, shard: Any, rank: Rank) -> None:
    dist.all_reduce(torch.zeros(2))
    if rank.rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.zeros(3, 4))


def call_different_ops(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 2:
        dist.broadcast(torch.zeros(5), 0)
    dist.all_reduce(torch.zeros(5))


def calls_alone(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    if rank.rank == 0:
        dist.all_reduce(torch.zeros(7))


def raises_while_others_wait(model: nn.Module, shard: Any, rank: Rank) -> None:
    if the_others_wait_for(1, rank):
        raise ValueError("no such thing")
    dist.barrier()


@cache
def ended_soon(step: Any) -> Verdict:
    """The verdict on a step that only a deadline ends."""
    with settings.using(SHORT):
        return check(own_case(layout="1x3"), step)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (
            rank_1_is_elsewhere,
            r"Ranks 0, 2 wait in all_reduce #2 of \(3, 4\) Float, for rank 1, which is at "
            r"test_deadlines.py:\d+ after all_reduce #1\.",
        ),
        (
            call_different_ops,
            r"The ranks do not call the same collective: ranks 0, 1 call all_reduce #1 of \(5,\) "
            r"Float; rank 2 calls broadcast #1 of \(5,\) Float\.",
        ),
        (
            calls_alone,
            r"Rank 0 waits in all_reduce #5 of \(7,\) Float, for rank 1, which has finished, and "
            r"for rank 2, which has finished\.",
        ),
        (
            raises_while_others_wait,
            r"Ranks 0, 2 wait in \w+ #1, for rank 1, which raised ValueError: no such "
            r"thing\.",
        ),
    ],
)
def test_who_waits_for_whom_is_one_sentence(step: Any, sentence: str) -> None:
    verdict = ended_soon(step)
    assert verdict.failure is not None
    assert re.fullmatch(sentence, verdict.failure.waiting), verdict.failure.waiting
    assert verdict.failure.waiting in " ".join(str(verdict).split())


class SlowMessage(Exception):
    """Its message takes longer to make than the other ranks get after the first failure."""

    def __str__(self) -> str:
        if not vars(self).setdefault("was_slow", False):
            self.was_slow = True
            time.sleep(1.5)
        return "said at last"


def raises_slowly(model: nn.Module, shard: Any, rank: Rank) -> None:
    dist.barrier()
    raise SlowMessage if rank.rank == 0 else ValueError("no such thing")


def test_a_rank_that_is_about_to_report_its_exception_is_waited_for() -> None:
    verdict = check(own_case(layout="1x2"), raises_slowly, deadline=20.0)
    assert verdict.failure is not None
    assert {end.rank: end.kind for end in verdict.failure.ends} == {0: "exception", 1: "exception"}
    assert "said at last" in str(verdict)


def test_the_last_collective_of_each_rank_is_reported_with_the_line_that_called_it() -> None:
    verdict = ended_soon(rank_1_is_elsewhere)
    assert verdict.failure is not None
    last = {end.rank: end.last for end in verdict.failure.ends}
    calls = [(collective.op, collective.number) for collective in last.values() if collective]
    assert calls == [("all_reduce", 1), ("all_reduce", 2), ("all_reduce", 2)]
    waiting = last[0]
    assert waiting is not None
    assert waiting.shapes == ((3, 4),)
    assert waiting.line.endswith("dist.all_reduce(torch.zeros(3, 4))")


@pytest.mark.parametrize("value", [0, -1.0, 3.0, 5.0, float("nan"), "1"])
def test_a_collective_cannot_take_longer_than_its_case(value: Any) -> None:
    with pytest.raises(BadCase) as caught:
        check(own_case(), right_step, deadline=3.0, collective_deadline=value)
    assert caught.value.field == "collective_deadline"


HANGS = """
import time

def hangs(model, rows, rank):
    time.sleep(1000)

@pytest.mark.ddp(deadline=1.0, second_look=False)
def test_marked(equivalence):
    equivalence.assert_equivalent(CASE, hangs)

@pytest.mark.parametrize("number", range(6))
def test_hangs(equivalence, number):
    equivalence.assert_equivalent(CASE, hangs)
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    (tmp_path / "test_theirs.py").write_text(THEIR_TEST + HANGS)
    return tmp_path


def test_a_marker_sets_the_deadline_of_one_test(theirs: Path) -> None:
    code, text = run(theirs, "-k", "test_marked")
    assert code == 1, text
    assert "ranks timed out" in text
    assert "still running" in text
    assert "Rerun" not in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (3.0, ()),
        # So long takes a worker to import torch on a busy machine.
        pytest.param(14.0, ("-n", "1"), marks=pytest.mark.thorough, id="a worker of xdist"),
    ],
)
def test_the_run_ends_at_its_deadline_and_tests_that_did_not_run_have_not_passed(
    theirs: Path, seconds: float, words: tuple[str, ...]
) -> None:
    """The time is enough for one or two of the six tests."""
    started = time.monotonic()
    limits = (f"--ddp-run-deadline={seconds}", f"--ddp-deadline={seconds / 2}")
    code, text = run(theirs, *limits, "--ddp-no-second-look", "-k", "test_hangs", *words)
    assert code in (1, 2), text
    assert f"--ddp-run-deadline: the {seconds:g} s of this run are over" in text
    assert "Not compared: ranks timed out" in text
    assert "6 failed" not in text
    assert time.monotonic() - started < 60


def test_a_worker_of_xdist_has_the_deadline_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(END, "")
    controller = RunDeadline(config_with_deadline(100.0))
    monkeypatch.setattr(time, "monotonic", lambda: controller.end)
    assert RunDeadline(config_with_deadline(100.0, workerinput={})).end == controller.end


def config_with_deadline(seconds: float, **more: Any) -> Any:
    return SimpleNamespace(getoption={"--ddp-run-deadline": seconds}.get, **more)


def test_nothing_starts_when_the_time_of_the_run_is_over(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("def test_one():\n    pass\ndef test_two(): pass\n")
    code, text = run(tmp_path, "--ddp-run-deadline=0.001")
    assert code != 0
    assert "--ddp-run-deadline: the 0.001 s of this run are over" in text
    assert "passed" not in text
