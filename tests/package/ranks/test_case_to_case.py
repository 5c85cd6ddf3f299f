"""Warm ranks: what one case leaves does not reach the next, and what is right is not blamed."""

from __future__ import annotations

import _thread
import importlib
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, RankFailed, assert_equivalent, check
from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import loss, own_case, right_step


def leaves_everything_changed(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    if rank.rank == 0:
        return
    torch.manual_seed(99)
    torch.set_default_dtype(torch.float16)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.environ["WORLD_SIZE"] = "99"
    os.environ["LEFT_BEHIND"] = "1"
    del os.environ["MASTER_PORT"]
    os.chdir("/")
    sys.path.clear()


CHANGES = (
    "torch's seed set to 99",
    "environment variable LEFT_BEHIND set",
    "environment variable MASTER_PORT removed",
    "environment variable WORLD_SIZE changed",
    "torch's default dtype changed from torch.float32 to torch.float16",
    "torch's deterministic algorithms changed from False to True",
    "torch's grad mode changed from True to False",
)


def test_what_a_case_changes_is_named_and_does_not_reach_the_next() -> None:
    started = warm_ranks().started
    with pytest.raises(RankFailed) as caught:
        assert_equivalent(own_case(), leaves_everything_changed)
    text = " ".join(str(caught.value).split())
    assert "The gradients are those of the big batch, but the step leaves" in text
    assert "Root cause: rank 1 (node 0, local rank 1)" in text
    assert "Finished its work: rank 0" in text
    for change in CHANGES:
        assert change in text
    after = check(own_case(), right_step)
    assert after.outcome == "same"
    assert not after.changed
    assert warm_ranks().started <= started + 1  # all of it was put back in the same ranks


def test_a_step_that_means_to_change_its_process_says_so() -> None:
    verdict = check(own_case(), leaves_everything_changed, allow_changes=True)
    assert verdict.outcome == "same"
    assert list(verdict.changed) == [1]
    assert set(CHANGES) <= set(verdict.changed[1])


def test_random_numbers_that_a_step_draws_are_no_change() -> None:
    def draws(model: nn.Module, shard: Any, rank: Rank) -> None:
        import random

        torch.rand(3)
        random.random()
        right_step(model, shard, rank)

    assert check(own_case(), draws).outcome == "same"


def compiled_step(model: nn.Module, shard: Any, rank: Rank) -> None:
    compiled: Any = torch.compile(DistributedDataParallel(model))
    loss(compiled, shard).backward()


def test_a_compiled_step_leaves_nothing_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler keeps threads, processes and environment variables for its next work."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    for _ in range(2):
        verdict = check(own_case(), compiled_step, deadline=120.0)
        assert verdict.outcome == "same", str(verdict)
        assert not verdict.changed


def test_the_pool_of_torchs_compiler_is_kept_and_a_pool_of_the_steps_own_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks have such a pool where TORCHINDUCTOR_COMPILE_THREADS asks for it."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)
    AsyncCompile.pool.cache_clear()
    before = process_state.current()
    with AsyncCompile.pool() as compilers:
        compilers.submit(int).result()
        assert not _threads_left(before)
        with ThreadPoolExecutor(1, thread_name_prefix="own") as own:
            own.submit(int).result()
            assert _threads_left(before) == ["thread 'own_0' left running"]
    AsyncCompile.pool.cache_clear()


def _threads_left(before: process_state.State) -> list[str]:
    """Without child processes, of which the judging one has its ranks' server."""
    return [one for one in process_state.left_running(before) if one.startswith("thread")]


TRAINS = """
import torch
from torch.nn.parallel import DistributedDataParallel

torch.set_float32_matmul_precision("high")
torch.backends.cudnn.benchmark = True

def step(model, shard, rank):
    print(torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark)
    ddp = DistributedDataParallel(model)
    torch.nn.functional.mse_loss(ddp(shard["rows"]), shard["targets"]).backward()
"""


def test_what_a_module_sets_at_import_holds_on_the_ranks_in_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trains_with_tf32.py").write_text(TRAINS)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = process_state.settings()
    try:
        train = importlib.import_module("trains_with_tf32")
        for _ in range(2):
            verdict = check(own_case(), train.step)
            assert verdict.outcome == "same", str(verdict)
            assert [text.split() for text in verdict.output.values()] == [["high", "True"]] * 2
    finally:
        process_state.take_over(before)
    assert check(own_case(), tells_its_precision).output[1].split() == ["highest"]


def tells_its_precision(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(torch.get_float32_matmul_precision())
    right_step(model, shard, rank)


def sets_precisions(model: nn.Module, shard: Any, rank: Rank) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    right_step(model, shard, rank)


def test_a_precision_set_for_one_backend_is_named_and_put_back() -> None:
    for _ in range(2):
        verdict = check(own_case(), sets_precisions)
        change = "backends.cuda.matmul.fp32_precision changed from none to tf32"
        assert verdict.changed == {0: (change,), 1: (change,)}
        assert verdict.outcome == "unknown"
    assert check(own_case(), tells_its_precision).output[1].split() == ["highest"]


def test_a_precision_set_in_the_test_holds_on_the_ranks() -> None:
    before = process_state.settings()
    torch.set_float32_matmul_precision("high")
    try:
        assert check(own_case(), tells_its_precision).output[1].split() == ["high"]
    finally:
        process_state.take_over(before)
    assert check(own_case(), tells_its_precision).output[1].split() == ["highest"]


def does_not_wait(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    if rank.rank == 1:
        dist.all_reduce(torch.zeros(3), async_op=True)


def test_a_collective_that_nobody_else_calls_or_waits_for_is_named() -> None:
    verdict = check(own_case(layout="1x3"), does_not_wait)
    text = " ".join(str(verdict).split())
    assert verdict.outcome == "unknown", text
    cause = "Root cause: rank 1 (node 0, local rank 1) 1 collective that other ranks do not call"
    assert cause in text
    assert check(own_case(layout="1x3"), right_step).outcome == "same"


def makes_a_group(model: nn.Module, shard: Any, rank: Rank) -> None:
    everybody = dist.new_group()
    ddp = DistributedDataParallel(model, process_group=everybody)
    loss(ddp, shard).backward()


def test_groups_that_a_step_makes_end_with_its_ranks() -> None:
    assert check(own_case(), right_step).outcome == "same"
    started = warm_ranks().started
    assert check(own_case(), makes_a_group).outcome == "same"
    assert check(own_case(), right_step).outcome == "same"
    assert warm_ranks().started == started + 1


def test_groups_of_the_catalogue_are_made_once() -> None:
    case = Case(model="mlp", loss="mse_mean", layout="2x2")
    assert check(case, "hybrid").outcome == "same"
    started = warm_ranks().started
    for _ in range(3):
        assert check(case, "hybrid").outcome == "same"
    assert warm_ranks().started == started


def test_a_rank_that_has_died_while_idle_is_replaced() -> None:
    verdict = check(own_case(), tells_its_process)
    pid = int(verdict.output[1])
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    verdict = check(own_case(), tells_its_process)
    assert verdict.outcome == "same", str(verdict)
    assert int(verdict.output[1]) != pid


def tells_its_process(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(os.getpid())
    right_step(model, shard, rank)


def test_a_thread_of_torchs_own_that_has_run_python_is_not_the_steps() -> None:
    def is_seen(model: nn.Module, shard: Any, rank: Rank) -> None:
        def logs() -> None:
            threading.current_thread()  # as any call of logging does
            time.sleep(1000)

        _thread.start_new_thread(logs, ())
        while threading.active_count() < 3:
            time.sleep(0.01)
        right_step(model, shard, rank)

    verdict = check(own_case(), is_seen, fresh_ranks=True)
    assert verdict.outcome == "same", str(verdict)


@pytest.mark.parametrize("fails", [False, True])
def test_a_last_line_without_an_end_is_in_the_output(fails: bool) -> None:
    def speaks(model: nn.Module, shard: Any, rank: Rank) -> None:
        print("rank", rank.rank, "was here", end="")
        right_step(model, shard, rank)
        if fails:
            raise ValueError("no such thing")

    assert check(own_case(), right_step).output == {0: "", 1: ""}
    verdict = check(own_case(), speaks)
    assert verdict.output == {0: "rank 0 was here", 1: "rank 1 was here"}
    assert check(own_case(), right_step).output == {0: "", 1: ""}
