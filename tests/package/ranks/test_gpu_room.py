"""Idle ranks leave a GPU that has no room for more, and only then."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import gpu_room, idle_sets, warm_ranks
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.gpu_room import GpuRoom, Lack, lack_of, processes_by_gpu
from ddp_equivalence.ranks.gpus import Gpu, Gpus
from ddp_equivalence.ranks.idle_sets import IdleSets, RankSetKey
from ddp_equivalence.ranks.lanes import Lane

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


def keep(idle: IdleSets, layout: str, lane: Lane = NCCL) -> Idle:
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
    for module in (gpu_room, idle_sets, warm_ranks):
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
    found = Gpus(tuple(Gpu(index, memory_total=total) for index in range(4)))
    monkeypatch.setattr(gpu_room, "gpus", lambda: found)
    monkeypatch.setattr(gpu_room, "cuda_devices", lambda: GPUS)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    room = gpu_room.gpu_room.__wrapped__()
    assert room.most_on("2") == most
    assert not room.is_exclusive("2")


def test_a_gpu_for_one_process_at_a_time_has_room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ("default", "exclusive_process")
    found = Gpus(tuple(Gpu(index, compute_mode=mode) for index, mode in enumerate(modes)))
    monkeypatch.setattr(gpu_room, "gpus", lambda: found)
    monkeypatch.setattr(gpu_room, "cuda_devices", lambda: ("0", "1"))
    room = gpu_room.gpu_room.__wrapped__()
    assert (room.most_on("0"), room.most_on("1")) == (gpu_room.WITHOUT_NVML, 1)
    assert room.is_exclusive("1")


@pytest.mark.parametrize(
    ("text", "lack"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB", Lack.MEMORY),
        ("DistBackendError: Cuda failure 2 'out of memory'", Lack.MEMORY),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Lack.MEMORY),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", Lack.PLACE),
        ("AssertionError: no such thing", None),
    ],
)
def test_what_a_gpu_lacked_is_read_from_the_error_of_any_rank(text: str, lack: Lack | None) -> None:
    assert lack_of(fails_with(text)) is lack


@pytest.mark.usefixtures("room")
def test_the_sets_that_were_idle_longest_on_a_full_gpu_leave() -> None:
    idle = IdleSets()
    on_cpu, first, second = keep(idle, "1x2", ON_CPU), keep(idle, "2x2"), keep(idle, "4x1")
    idle.make_room(key("1x4"), GPUS)
    assert (on_cpu.stopped, first.stopped, second.stopped) == (False, True, False)
    idle.make_room(key("1x2", ON_CPU), ())
    assert not second.stopped


def test_sets_leave_gpus_that_had_no_memory_for_the_next_ranks(room: GpuRoom) -> None:
    idle = IdleSets()
    on_cpu, on_gpus = keep(idle, "1x2", ON_CPU), keep(idle, "2x2")
    assert not idle.leave_gpus(key("1x4"), GPUS, fails_with("no such thing"))
    assert not idle.leave_gpus(key("1x2", ON_CPU), (), fails_with("out of memory"))
    assert [one.stopped for one in (on_cpu, on_gpus)] == [False, False]
    assert idle.leave_gpus(key("1x4"), GPUS, fails_with("CUDA error: out of memory"))
    assert [one.stopped for one in (on_cpu, on_gpus)] == [False, True]
    assert not idle.leave_gpus(key("1x4"), GPUS, fails_with("CUDA error: out of memory"))
    assert not room.is_exclusive("0")


def test_a_gpu_that_was_busy_is_for_one_process_from_then_on(room: GpuRoom) -> None:
    idle = IdleSets()
    kept = keep(idle, "2x2")
    assert idle.leave_gpus(key("1x4"), GPUS, fails_with(f"CUDA error: {gpu_room.BUSY}"))
    assert kept.stopped
    assert all(map(room.is_exclusive, GPUS))


class Workers:
    """The locks of a run with several workers. ``asked``: the GPUs that were asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def ask_for(self, devices: Any) -> None:
        self.asked |= set(devices)

    def is_asked_for(self, device: str) -> bool:
        return device in self.asked


def test_ranks_leave_gpus_that_other_workers_have_asked_for(
    room: GpuRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers()
    monkeypatch.setattr(warm_ranks, "xdist_locks", lambda: workers)
    assert not warm_ranks.must_leave(key("2x2"), GPUS)
    workers.ask_for(["3"])
    assert warm_ranks.must_leave(key("2x2"), GPUS)
    assert not warm_ranks.must_leave(key("1x2", ON_CPU), ())
    workers.asked.clear()
    room.note_exclusive("1")
    assert warm_ranks.must_leave(key("2x2"), GPUS)
    monkeypatch.setattr(warm_ranks, "xdist_locks", lambda: None)
    assert not warm_ranks.must_leave(key("2x2"), GPUS)


def test_only_ranks_that_lack_room_on_a_gpu_wait_for_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers()
    monkeypatch.setattr(warm_ranks, "xdist_locks", lambda: workers)
    monkeypatch.setattr(warm_ranks, "PAUSE", 0.0)
    later, full = float("inf"), fails_with("out of memory")
    assert not warm_ranks.others_may_leave(key("1x4"), GPUS, fails_with("other"), later)
    assert not warm_ranks.others_may_leave(key("1x2", ON_CPU), (), full, later)
    assert not warm_ranks.others_may_leave(key("1x4"), GPUS, full, 0.0)
    assert not workers.asked
    assert warm_ranks.others_may_leave(key("1x4"), GPUS, full, later)
    assert workers.asked == set(GPUS)
