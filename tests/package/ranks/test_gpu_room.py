"""Idle ranks leave a GPU that has no room for more, and only then."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import gpu_room, warm_ranks
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.gpu_room import (
    BUSY,
    OUT_OF_MEMORY,
    GpuRoom,
    failed_with,
    processes_by_gpu,
)
from ddp_equivalence.ranks.gpus import Gpu
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.warm_ranks import RankSetKey, WarmRanks

NCCL = Lane("nccl", "nccl", "cuda")
GLOO_CUDA = Lane("gloo_cuda", "gloo", "cuda")
DATA_PARALLEL = Lane("data_parallel", "gloo", "cuda")
ON_CPU = Lane("gloo", "gloo", "cpu")
GPUS = ("0", "1", "2", "3")
GB = 2**30


class Idle:
    """A set of ranks that notes whether it was stopped."""

    def __init__(self, layout: str) -> None:
        self.layout = parse(layout)
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


def key(layout: str, lane: Lane = NCCL) -> RankSetKey:
    return RankSetKey(parse(layout), lane, 30.0, (), "forkserver")


def keep(idle: WarmRanks, layout: str, lane: Lane = NCCL) -> Idle:
    kept = Idle(layout)
    idle.keep(key(layout, lane), GPUS if lane.device_type == "cuda" else (), cast(Any, kept))
    return kept


def fails_with(text: str) -> RankFailed:
    ends = [RankEnd(0, 0, 0, "running"), RankEnd(1, 0, 1, "exception", text)]
    return RankFailed("rank 0 waited", ends)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> GpuRoom:
    """Four GPUs with room for two processes each."""
    room = GpuRoom(dict.fromkeys(GPUS, 2))
    for module in (gpu_room, warm_ranks):
        monkeypatch.setattr(module, "gpu_room", lambda: room)
    return room


def test_every_rank_is_a_process_on_its_gpu() -> None:
    assert sum(processes_by_gpu(parse("1x2"), NCCL, GPUS).values()) == 2
    assert processes_by_gpu(parse("2x2"), NCCL, GPUS) == dict.fromkeys(GPUS, 1)
    assert processes_by_gpu(parse("1x4"), GLOO_CUDA, ("5", "7")) == {"5": 2, "7": 2}
    assert processes_by_gpu(parse("1x1"), DATA_PARALLEL, GPUS) == dict.fromkeys(GPUS, 1)
    assert processes_by_gpu(parse("1x2"), ON_CPU, ()) == {}


@pytest.mark.parametrize(
    ("memory", "workers", "most"), [(8, 1, 3), (24, 1, 10), (80, 4, 8), (8, 8, 1), (None, 1, 8)]
)
def test_idle_ranks_may_hold_a_quarter_of_the_memory_of_a_gpu(
    memory: int | None, workers: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = None if memory is None else memory * GB
    found = {name: Gpu(int(name), memory_total=total) for name in GPUS}
    monkeypatch.setattr(gpu_room, "gpus_by_name", lambda _: found)
    monkeypatch.setattr(gpu_room, "cuda_devices", lambda: GPUS)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    room = gpu_room.gpu_room.__wrapped__()
    assert room.most_on("2") == most
    assert "2" not in room.exclusive


def test_a_gpu_for_one_process_at_a_time_has_room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"0": Gpu(0, compute_mode="default"), "1": Gpu(1, compute_mode="exclusive_process")}
    monkeypatch.setattr(gpu_room, "gpus_by_name", lambda _: found)
    monkeypatch.setattr(gpu_room, "cuda_devices", lambda: ("0", "1"))
    monkeypatch.delenv(gpu_room.WORKERS_VARIABLE, raising=False)
    room = gpu_room.gpu_room.__wrapped__()
    assert (room.most_on("0"), room.most_on("1")) == (gpu_room.WITHOUT_NVML, 1)
    assert "1" in room.exclusive


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB", OUT_OF_MEMORY),
        ("DistBackendError: Cuda failure 2 'out of memory'", OUT_OF_MEMORY),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", OUT_OF_MEMORY),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", BUSY),
    ],
)
def test_what_a_gpu_lacked_is_read_from_the_error_of_any_rank(
    text: str, phrases: tuple[str, ...]
) -> None:
    assert failed_with(fails_with(text), phrases)
    assert not failed_with(fails_with("AssertionError: no such thing"), phrases)


@pytest.mark.usefixtures("room")
def test_the_sets_that_were_idle_longest_on_a_full_gpu_leave() -> None:
    idle = WarmRanks()
    on_cpu, first, second = keep(idle, "1x2", ON_CPU), keep(idle, "2x2"), keep(idle, "4x1")
    idle.make_room(key("1x4"), GPUS)
    assert (on_cpu.stopped, first.stopped, second.stopped) == (False, True, False)
    idle.make_room(key("1x2", ON_CPU), ())
    assert not second.stopped


def test_sets_leave_gpus_that_had_no_memory_for_the_next_ranks(room: GpuRoom) -> None:
    idle = WarmRanks()
    on_cpu, on_gpus = keep(idle, "1x2", ON_CPU), keep(idle, "2x2")
    assert not idle.leave_gpus(key("1x4"), GPUS, fails_with("no such thing"))
    assert not idle.leave_gpus(key("1x2", ON_CPU), (), fails_with("out of memory"))
    assert [one.stopped for one in (on_cpu, on_gpus)] == [False, False]
    assert idle.leave_gpus(key("1x4"), GPUS, fails_with("CUDA error: out of memory"))
    assert [one.stopped for one in (on_cpu, on_gpus)] == [False, True]
    assert not idle.leave_gpus(key("1x4"), GPUS, fails_with("CUDA error: out of memory"))
    assert not room.exclusive


def test_a_gpu_that_was_busy_is_for_one_process_from_then_on(room: GpuRoom) -> None:
    idle = WarmRanks()
    kept = keep(idle, "2x2")
    assert idle.leave_gpus(key("1x4"), GPUS, fails_with(f"CUDA error: {BUSY[0]}"))
    assert kept.stopped
    assert room.exclusive == set(GPUS)


def test_ranks_leave_a_gpu_for_one_process_that_other_workers_need(
    room: GpuRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_ranks, "xdist_locks", lambda: object())
    assert not warm_ranks.must_leave(key("2x2"), GPUS)
    room.exclusive.add("1")
    assert warm_ranks.must_leave(key("2x2"), GPUS)
    assert not warm_ranks.must_leave(key("1x2", ON_CPU), ())
    monkeypatch.setattr(warm_ranks, "xdist_locks", lambda: None)
    assert not warm_ranks.must_leave(key("2x2"), GPUS)
