"""However a rank ends, the end is accounted for, the next case is right, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import (
    BadCase,
    Rank,
    RankFailed,
    RanksTimedOut,
    Verdict,
    assert_equivalent,
    check,
)
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.lanes import Lane, choose
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.server import METHOD
from ddp_equivalence.ranks.warm_ranks import WarmRanks, warm_ranks
from tests.package.own_cases import loss, own_case, right_step


def raises(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("no such thing")
    right_step(model, shard, rank)


def exits(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        sys.exit(0)
    right_step(model, shard, rank)


def exits_at_once(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        os._exit(0)
    right_step(model, shard, rank)


def is_killed(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    right_step(model, shard, rank)


def is_killed_at_the_end(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def returns_a_number(model: nn.Module, shard: Any, rank: Rank) -> Any:
    right_step(model, shard, rank)
    return 3.0


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (raises, "ValueError: no such thing"),
        (exits, "SystemExit: 0"),
        (exits_at_once, "ended without a result, exit code 0"),
        (is_killed, "killed by SIGKILL (out of memory?"),
        (is_killed_at_the_end, "killed by SIGSEGV"),
    ],
)
def test_a_rank_that_ends_early_is_the_root_cause_and_the_next_case_is_right(
    step: Any, what: str
) -> None:
    with pytest.raises(RankFailed) as caught:
        assert_equivalent(own_case(layout="1+2", shards="equal"), step, deadline=20)
    ends = caught.value.ends
    assert sorted(end.rank for end in ends) == [0, 1, 2]
    assert (ends[0].rank, ends[0].node, ends[0].local_rank) == (1, 1, 0)
    assert ends[0].what.startswith(what)
    text = str(caught.value)
    assert f"Root cause: rank 1 (node 1, local rank 0) {what}" in text
    assert "Not compared: a rank failed. This says nothing about equivalence." in text
    assert check(own_case(layout="1+2"), right_step).outcome == "same"


def hangs_in_the_middle_of_a_message(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Four bytes announce a message of 1,000; one comes."""
    right_step(model, shard, rank)
    frame = sys._getframe()
    while frame.f_code.co_name != "_work":
        assert frame.f_back is not None
        frame = frame.f_back
    if rank.rank == 1:
        os.write(frame.f_locals["connection"].fileno(), struct.pack("!i", 1000) + b"x")
        time.sleep(1000)


def test_a_rank_that_hangs_in_the_middle_of_a_message_does_not_hang_the_judge() -> None:
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


def test_a_step_that_returns_something_else_is_told_what_would_be_right() -> None:
    verdict = check(own_case(), returns_a_number)
    assert "returned float; expected None, or a dict of parameter name" in str(verdict)


def waits_for_ever(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 0:
        time.sleep(1000)
    right_step(model, shard, rank)


def test_a_rank_that_hangs_ends_with_the_deadline_and_shows_where_it_is() -> None:
    started = time.monotonic()
    with pytest.raises(RanksTimedOut) as caught:
        assert_equivalent(own_case(), waits_for_ever, deadline=2)
    assert time.monotonic() - started < 60
    text = str(caught.value)
    assert "ranks timed out" in text
    assert "in waits_for_ever" in text
    assert check(own_case(), right_step).outcome == "same"


def keeps_its_wrapper(model: nn.Module, shard: Any, rank: Rank) -> None:
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(model)
    torch.kept = ddp  # type: ignore[attr-defined]  # outlives the case
    loss(ddp, shard).backward()


def test_a_wrapper_that_outlives_its_case_does_not_hang_the_end() -> None:
    assert check(own_case(), keeps_its_wrapper, fresh_ranks=True).outcome == "same"


def test_more_collectives_than_the_recorder_holds_are_counted() -> None:
    """The exchange itself is among the forgotten ones: that is no proof that there was none."""

    def talks(model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)
        for _ in range(100):
            dist.barrier()

    verdict = check(own_case(), talks)
    assert verdict.outcome == "same"
    found = re.search(r"rank 0 issued (\d+) \w+ .* \(and (\d+) earlier ones", _line(verdict))
    assert found is not None
    assert int(found[1]) + int(found[2]) == 104
    again = check(own_case(), right_step)
    assert "1 all_reduce of 66 elements" in _line(again)
    assert "earlier ones" not in _line(again)


def _line(verdict: Verdict) -> str:
    return " ".join(str(verdict).split())


def test_ranks_stay_warm_and_fresh_ones_are_new() -> None:
    seen: list[tuple[int, ...]] = []

    def tell(model: nn.Module, shard: Any, rank: Rank) -> None:
        print(os.getpid())
        right_step(model, shard, rank)

    for fresh in (False, False, True, False):
        verdict = check(own_case(), tell, fresh_ranks=fresh)
        seen.append(tuple(int(verdict.output[rank]) for rank in (0, 1)))
    assert seen[0] == seen[1] == seen[3]
    assert not set(seen[0]) & set(seen[2])
    assert not _alive(seen[2])


def test_the_judging_process_is_in_no_group() -> None:
    check(own_case(), right_step)
    assert not dist.is_initialized()
    assert not torch.cuda.is_initialized()


def test_ranks_leave_no_process_and_not_even_alive_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks = WarmRanks()
    layout = parse("1x2")
    with ranks.acquire(layout, choose(layout, "gloo"), 30.0) as rank_set:
        pids = [process.pid for process in rank_set._processes.values()]
        assert _alive(pids)
        assert not list(tmp_path.glob("ddp_equivalence-*"))
    ranks.stop()
    assert not _alive(pids)


def test_the_oldest_idle_ranks_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_equivalence.ranks.warm_ranks.MAX_IDLE_RANKS", 3)
    warm_ranks().stop()
    before = warm_ranks().started
    for layout in ("1x2", "1x2", "2x1", "1x2"):
        assert check(own_case(layout=layout), right_step).outcome == "same"
    assert warm_ranks().started - before == 3


def test_ranks_can_be_spawned_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def tells_its_parent(model: nn.Module, shard: Any, rank: Rank) -> None:
        print(os.getppid())
        right_step(model, shard, rank)

    monkeypatch.setenv(METHOD, "spawn")
    verdict = check(own_case(), tells_its_parent)
    assert verdict.outcome == "same", str(verdict)
    assert [int(text) for text in verdict.output.values()] == [os.getpid()] * 2
    monkeypatch.delenv(METHOD)
    verdict = check(own_case(), tells_its_parent)
    assert os.getpid() not in [int(text) for text in verdict.output.values()]


def test_another_start_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHOD, "fork")
    with pytest.raises(BadCase, match=f"{METHOD} = 'fork': forkserver .* or spawn"):
        check(own_case(), right_step)


def test_ranks_are_spawned_where_cuda_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ranks on a GPU whose server has used CUDA: what torch then says, and when."""
    tried: list[str] = []

    class OnCuda(RankSet):
        def start(self) -> None:
            tried.append(self._method)
            if self._method != "spawn":
                raise RankFailed("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To")

    monkeypatch.setattr("ddp_equivalence.ranks.warm_ranks.RankSet", OnCuda)
    ranks, layout = WarmRanks(), parse("1x2")
    for _ in range(2):
        with ranks.acquire(layout, Lane("nccl", "nccl", "cuda"), 30.0, fresh=True):
            pass
    assert tried == ["forkserver", "spawn", "spawn"]


def test_output_of_every_rank_comes_with_the_verdict() -> None:
    def speaks(model: nn.Module, shard: Any, rank: Rank) -> None:
        print("hello from", rank.rank)
        os.write(2, b"and from below python\n")
        right_step(model, shard, rank)

    verdict = check(own_case(), speaks)
    assert "hello from 1" in verdict.output[1]
    assert "and from below python" in verdict.output[1]
    assert "hello" not in str(check(own_case(), right_step).output)


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
import os, signal
from ddp_equivalence import check
from tests.suite.own_cases import own_case
from torch.nn.parallel import DistributedDataParallel

offset = 0.0

def step(model, shard, rank):
    print(os.getpid())
    ddp = DistributedDataParallel(model)
    (((ddp(shard["rows"]) - shard["targets"]) ** 2).mean() + offset).backward()

verdict = check(own_case(), step)
print(verdict.outcome, *map(str.strip, verdict.output.values()), flush=True)
"""


def _run(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
        env=dict(os.environ) | {"TMPDIR": str(tmp_path)},
    )


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    done = _run(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "same"
    assert done.stdout.count("same") == 1


FORKS = """
import torch
torch.set_num_threads(1)
child = os.fork()
print("forked", check(own_case(), step).outcome, flush=True)
if child == 0:
    from ddp_equivalence.ranks.warm import warm_ranks
    warm_ranks().stop()
    os._exit(0)
print("child ended with", os.waitpid(child, 0)[1])
print("after", check(own_case(), step).outcome)
"""


def test_a_fork_of_the_judging_process_has_ranks_of_its_own(tmp_path: Path) -> None:
    """As under pytest --forked; and the workers of a DataLoader must not keep ours."""
    done = _run(SCRIPT + FORKS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forked same") == 2, done.stdout + done.stderr
    assert "child ended with 0\nafter same" in done.stdout


KILLS_THE_JUDGE = """
os.environ["JUDGE"] = str(os.getpid())

def kills_the_judge(model, shard, rank):
    import pathlib, time
    pathlib.Path(f"rank{rank.rank}").write_text(str(os.getpid()))
    torch.distributed.barrier()
    if rank.rank == 0:
        os.kill(int(os.environ["JUDGE"]), signal.SIGKILL)
    time.sleep(100)

import torch
check(own_case(), kills_the_judge)
"""


def test_ranks_at_work_end_with_a_judging_process_that_is_killed(tmp_path: Path) -> None:
    done = _run(SCRIPT + KILLS_THE_JUDGE, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    until = time.monotonic() + 20
    while _alive(pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _alive(pids)


def _alive(pids: Any) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
