"""What one case changes in its process is reported and does not reach the next case."""

from __future__ import annotations

import _thread
import importlib
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, RankFailed, assert_equivalent, check
from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.process_state import current_threads, left_running
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


@pytest.mark.usefixtures("as_if_alone")
def test_every_change_that_a_case_makes_is_reported_and_does_not_reach_the_next() -> None:
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
    assert warm_ranks().started <= started + 1  # the same ranks go on


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


@pytest.mark.thorough
def test_a_compiled_step_is_not_blamed_for_what_the_compiler_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler keeps threads, processes and environment variables for its next work."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    verdict = check(own_case(layout="1x1"), compiled_step, deadline=120.0)
    assert verdict.outcome == "same", str(verdict)
    assert not verdict.changed


def test_the_pool_of_torchs_compiler_is_ignored_and_a_pool_of_the_step_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks have the compiler's pool only if TORCHINDUCTOR_COMPILE_THREADS is more than 1."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)
    AsyncCompile.pool.cache_clear()
    before = current_threads()
    with AsyncCompile.pool() as compilers:
        compilers.submit(int).result()
        assert not threads_left(before)
        with ThreadPoolExecutor(1, thread_name_prefix="own") as own_pool:
            own_pool.submit(int).result()
            assert threads_left(before) == ["thread 'own_0' left running"]
    AsyncCompile.pool.cache_clear()


def threads_left(before: frozenset[int | None]) -> list[str]:
    """The new threads. Child processes are left out: this process has the fork server."""
    return [phrase for phrase in left_running(before) if phrase.startswith("thread")]


TRAINS_WITH_TF32 = """
import torch
from torch.nn.parallel import DistributedDataParallel

torch.set_float32_matmul_precision("high")
torch.backends.cudnn.benchmark = True

def step(model, shard, rank):
    print(torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark)
    ddp = DistributedDataParallel(model)
    torch.nn.functional.mse_loss(ddp(shard["rows"]), shard["targets"]).backward()
"""


def test_settings_that_a_module_makes_at_import_hold_on_the_ranks_in_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trains_with_tf32.py").write_text(TRAINS_WITH_TF32)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = process_state.read_training_settings()
    try:
        train = importlib.import_module("trains_with_tf32")
        for _ in range(2):
            verdict = check(own_case(), train.step)
            assert verdict.outcome == "same", str(verdict)
            assert [text.split() for text in verdict.output.values()] == [["high", "True"]] * 2
    finally:
        process_state.apply(before)
    assert check(own_case(), prints_its_precision).output[1].split() == ["highest"]


def prints_its_precision(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(torch.get_float32_matmul_precision())
    right_step(model, shard, rank)


def sets_precisions(model: nn.Module, shard: Any, rank: Rank) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    right_step(model, shard, rank)


def test_a_precision_set_for_one_backend_is_reported_and_restored() -> None:
    for _ in range(2):
        verdict = check(own_case(), sets_precisions)
        change = "backends.cuda.matmul.fp32_precision changed from none to tf32"
        assert verdict.changed == {0: (change,), 1: (change,)}
        assert verdict.outcome == "unknown"
    assert check(own_case(), prints_its_precision).output[1].split() == ["highest"]


def test_a_thread_of_torch_that_has_run_python_is_not_blamed_on_the_step() -> None:
    def starts_a_thread(model: nn.Module, shard: Any, rank: Rank) -> None:
        def log() -> None:
            threading.current_thread()  # every call of logging does this
            time.sleep(1000)

        _thread.start_new_thread(log, ())
        while threading.active_count() < 3:
            time.sleep(0.01)
        right_step(model, shard, rank)

    verdict = check(own_case(), starts_a_thread, fresh_ranks=True)
    assert verdict.outcome == "same", str(verdict)
