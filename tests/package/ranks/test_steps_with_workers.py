"""A step may start worker processes, as a DataLoader does, and none of them outlives its check."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, TypeVar

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ddp_equivalence import Rank, assert_equivalent, check
from ddp_equivalence.ranks import process_tree
from ddp_equivalence.ranks.server import FOLDER_VARIABLE
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import loss, own_case, right_step

Rows = dict[str, Tensor]
T = TypeVar("T")

TRIES = 5
"""Ranks that go on are found within so many checks."""


class ShardDataset(Dataset[Rows]):
    """The rows of a shard, one by one. A class of a test file, which no worker can import."""

    def __init__(self, shard: Rows) -> None:
        self.shard = shard

    def __len__(self) -> int:
        return len(self.shard["rows"])

    def __getitem__(self, index: int) -> Rows:
        if get_worker_info() is None:
            raise RuntimeError("this row is not read in a worker")
        return {name: column[index] for name, column in self.shard.items()}


@dataclass
class RowBatch:
    """What ``collate`` makes of rows. Workers send objects of this class to their rank."""

    columns: Rows


def collate(rows: list[Rows]) -> RowBatch:
    return RowBatch({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def collate_rows(rows: list[Rows]) -> Rows:
    return collate(rows).columns


def train(model: nn.Module, batches: list[Rows], rank: Rank) -> None:
    """A right step over all rows that the workers have read."""
    columns = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    right_step(model, columns, rank)


def loads(
    make: Callable[[Rows], Any], epochs: int, model: nn.Module, shard: Rows, rank: Rank
) -> None:
    """A step that reads its shard with the loader that ``make`` returns."""
    loader = make(shard)
    for _ in range(epochs):
        batches = list(loader)
    train(model, batches, rank)


def loads_rows_of_a_class(model: nn.Module, shard: Rows, rank: Rank) -> None:
    loader = DataLoader(ShardDataset(shard), 2, num_workers=2, collate_fn=collate)
    train(model, [batch.columns for batch in loader], rank)


def gathers_objects_of_a_class(model: nn.Module, shard: Rows, rank: Rank) -> None:
    batch, everyone = RowBatch(shard), [RowBatch({})] * rank.world_size
    dist.all_gather_object(everyone, batch)
    assert all(type(one) is RowBatch and one.columns.keys() == shard.keys() for one in everyone)
    right_step(model, shard, rank)


def abandons(model: nn.Module, shard: Rows, rank: Rank) -> None:
    """Leaves an iterator half-way in a reference cycle."""
    iterator = iter(DataLoader(ShardDataset(shard), 1, num_workers=2, prefetch_factor=4))
    next(iterator)
    cycle: list[object] = [iterator]
    cycle.append(cycle)
    right_step(model, shard, rank)


def loader_of(shard: Rows, **options: Any) -> DataLoader[Rows]:
    return DataLoader(ShardDataset(shard), **({"batch_size": 2, "num_workers": 2} | options))


def square(number: int) -> int:
    return number * number


def uses_a_pool(method: str, model: nn.Module, shard: Rows, rank: Rank) -> None:
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]
    right_step(model, shard, rank)


def drops_an_executor(model: nn.Module, shard: Rows, rank: Rank) -> None:
    assert ProcessPoolExecutor(1).submit(square, 3).result() == 9
    right_step(model, shard, rank)


def uses_commands(model: nn.Module, shard: Rows, rank: Rank) -> None:
    assert subprocess.run(["echo", "done"], capture_output=True, check=True).stdout == b"done\n"
    forgotten = subprocess.Popen(["true"])
    os.waitid(os.P_PID, forgotten.pid, os.WEXITED | os.WNOWAIT)  # it ends, and is left as it is
    multiprocessing.get_context("fork").Process(target=square, args=(2,)).start()
    right_step(model, shard, rank)


STEPS: dict[str, Callable[..., None]] = {
    "a class of rows": loads_rows_of_a_class,
    "objects of a class, sent to other ranks": gathers_objects_of_a_class,
    "persistent": partial(loads, partial(loader_of, persistent_workers=True), 3),
    "abandoned": abandons,
    "spawn pool": partial(uses_a_pool, "spawn"),
    "an executor nobody shuts down": drops_an_executor,
    "commands": uses_commands,
}


def workers_left() -> list[str]:
    """What the server and the ranks have started and is no rank: it must end soon."""
    left: list[str] = []
    until = time.monotonic() + 10
    while time.monotonic() < until:
        ranks = {pid for rank_set in warm_ranks().idle() for pid in rank_set.process_ids()}
        # A process that was forked has the first environment of the server, which has the folder.
        family = process_tree.with_variable(FOLDER_VARIABLE, util.get_temp_dir())
        left = [str(process) for process in family if process.pid not in ranks | keepers()]
        if not left:
            break
        time.sleep(0.05)
    return left


def keepers() -> set[int]:
    """The process ids of this process's fork server and resource tracker."""
    tracker: Any = resource_tracker._resource_tracker
    server: Any = forkserver._forkserver
    return {tracker._pid, server._forkserver_pid}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.usefixtures("as_if_alone")
def test_a_step_with_workers_is_the_same_and_leaves_none_and_the_ranks_go_on(name: str) -> None:
    started = list[int]()
    # The first check may begin with new ranks, since the step may import other modules. On a busy
    # machine ranks may be replaced, too, because a process that is about to end takes too long.
    while started[-2:-1] != started[-1:] or not started:
        assert len(started) < TRIES
        verdict = check(own_case(), STEPS[name], deadline=9.0)
        assert verdict.outcome == "same", str(verdict)
        assert not verdict.changed
        assert workers_left() == []
        started.append(warm_ranks().started)


def starts_workers(shard: Rows) -> None:
    """Leaves workers that wait for work, where garbage collection does not find them."""
    iterator = iter(loader_of(shard, persistent_workers=True))
    next(iterator)
    context = multiprocessing.get_context("fork")
    context.Process(target=time.sleep, args=(1000,), daemon=True).start()
    sys.modules["kept by a step"] = (iterator, context.Pool(1))  # type: ignore[assignment]


def differs(model: nn.Module, shard: Rows, rank: Rank) -> None:
    starts_workers(shard)
    loss(model, shard).backward()


def hangs(model: nn.Module, shard: Rows, rank: Rank) -> None:
    starts_workers(shard)
    time.sleep(1000)


def loses_a_worker(model: nn.Module, shard: Rows, rank: Rank) -> None:
    # Torch swallows the error of the worker if it comes while torch imports a part of its profiler.
    list(loader_of(shard))
    list(loader_of(shard, collate_fn=kills_itself))


def kills_itself(rows: list[Rows]) -> Rows:
    os.kill(os.getpid(), signal.SIGKILL)
    return collate_rows(rows)


FAILURES = {
    "differs": (differs, "no_all_reduce"),
    "hangs": (hangs, "still running"),
    "loses a worker": (loses_a_worker, "DataLoader worker (pid"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_no_worker_outlives_a_check_that_fails(name: str) -> None:
    step, message = FAILURES[name]
    verdict = check(own_case(), step, deadline=3.0)
    assert verdict.outcome != "same"
    assert message in " ".join(str(verdict).split())
    assert workers_left() == []
    assert check(own_case(), right_step).outcome == "same"


def keeps_its_workers(model: nn.Module, shard: Rows, rank: Rank) -> None:
    starts_workers(shard)
    right_step(model, shard, rank)


@pytest.mark.usefixtures("as_if_alone")
def test_workers_that_a_step_keeps_are_reported_by_name_and_the_ranks_are_replaced() -> None:
    assert_equivalent(own_case(), right_step)
    started = warm_ranks().started
    verdict = check(own_case(), keeps_its_workers)
    text = " ".join(str(verdict).split())
    assert verdict.outcome == "unknown", text
    assert "left running (a worker of a DataLoader, which lives as long as its iterator)" in text
    assert re.search(r"left running \(ForkPoolWorker-\S+, started with multiprocessing\)", text)
    assert workers_left() == []
    assert check(own_case(), right_step).outcome == "same"
    assert warm_ranks().started == started + 1


def keeps_workers_of_a_fork_server(model: nn.Module, shard: Rows, rank: Rank) -> None:
    context = multiprocessing.get_context("forkserver")
    context.Process(target=time.sleep, args=(1000,)).start()
    right_step(model, shard, rank)


def test_workers_of_a_fork_server_of_the_step_are_reported_and_end() -> None:
    verdict = check(own_case(layout="1x1"), keeps_workers_of_a_fork_server)
    assert verdict.outcome == "unknown"
    assert "started with multiprocessing" in str(verdict)
    assert workers_left() == []


def chooses_a_start_method(model: nn.Module, shard: Rows, rank: Rank) -> None:
    list(loader_of(shard, batch_size=3))  # uses the default method
    multiprocessing.set_start_method("spawn", force=True)
    right_step(model, shard, rank)


def needs_no_force(model: nn.Module, shard: Rows, rank: Rank) -> None:
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0])
    right_step(model, shard, rank)


def test_the_start_method_is_that_of_a_script_and_a_choice_does_not_reach_the_next_case() -> None:
    change = "multiprocessing's start method changed from fork to spawn"
    verdict = check(own_case(), chooses_a_start_method)
    assert verdict.changed == {0: (change,), 1: (change,)}
    assert check(own_case(), needs_no_force).outcome == "same"
    assert check(own_case(), STEPS["persistent"]).outcome == "same"


def test_rank_0_in_this_process_may_start_workers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # So long torch waits for each worker of an iterator that is abandoned, here instead of 5 s.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    before = {child.pid for child in psutil.Process().children()}
    for name in ("a class of rows", "abandoned"):
        verdict = check(own_case(), STEPS[name], in_process=True)
        assert verdict.outcome == "same", str(verdict)
        assert not verdict.changed
    gc.collect()
    warm_ranks().stop()
    assert {child.pid for child in psutil.Process().children()} <= before
