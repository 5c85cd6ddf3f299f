"""Which lane a case gets, and which GPUs its ranks get there."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from ddp_equivalence import BadCase, Case, check
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.lanes import (
    CannotRunHere,
    Lane,
    choose,
    device_of,
    devices_of_ranks,
    first_device,
    missing,
    visible_devices,
)
from ddp_equivalence.strategies.catalogue import EIGHT_GPUS, LAYOUTS

NCCL = Lane("nccl", "nccl", "cuda")
GLOO_CUDA = Lane("gloo_cuda", "gloo", "cuda")
EIGHT = tuple("01234567")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give this machine a number of GPUs, and torch a backend for them."""

    def give(count: int) -> None:
        monkeypatch.setattr("ddp_equivalence.ranks.lanes.cuda_devices", lambda: EIGHT[:count])
        monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: True)

    return give


def test_every_layout_begins_with_the_same_gpu_in_every_run() -> None:
    assert [first_device(parse(layout), NCCL, 8) for layout in ("1x1", "1x2", "1x4")] == [5, 7, 2]


def test_layouts_with_few_ranks_use_all_eight_gpus() -> None:
    few = [parse(layout) for layout in LAYOUTS if parse(layout).world_size < 8]
    used = {gpu for layout in few for gpu in devices_of_ranks(layout, NCCL, EIGHT).values()}
    assert used == set(EIGHT)


@pytest.mark.parametrize("layout", [*LAYOUTS, EIGHT_GPUS, "1+2"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("lane", [NCCL, GLOO_CUDA], ids=str)
def test_cuda_local_rank_is_the_gpu_of_the_rank(layout: str, count: int, lane: Lane) -> None:
    ranks, devices = parse(layout), EIGHT[:count]
    of_rank = devices_of_ranks(ranks, lane, devices)
    visible = visible_devices(ranks, lane, devices)
    for row in ranks.rows:
        device = device_of(row.local_rank, lane, visible[row.rank])
        assert visible[row.rank].split(",")[device.index] == of_rank[row.rank]
    if ranks.world_size <= count:
        assert len(set(of_rank.values())) == ranks.world_size
        nodes = {row.node: visible[row.rank].split(",") for row in ranks.rows}
        seen = [gpu for of_node in nodes.values() for gpu in of_node]
        assert len(seen) == len(set(seen)) == ranks.world_size
    else:
        assert set(of_rank.values()) == set(devices)


def test_one_process_sees_every_gpu() -> None:
    lane = Lane("data_parallel", "gloo", "cuda")
    (visible,) = visible_devices(parse("1x1"), lane, EIGHT).values()
    assert sorted(visible.split(",")) == sorted(EIGHT)


def test_ranks_on_the_cpu_see_no_gpu() -> None:
    lane = Lane("gloo", "gloo", "cpu")
    assert devices_of_ranks(parse("1x2"), lane, EIGHT) == {}
    assert visible_devices(parse("1x2"), lane, EIGHT) == {0: "", 1: ""}


def test_sparse_gradients_go_to_gloo_on_the_gpus(gpus: Callable[[int], None]) -> None:
    gpus(2)
    lane = choose(parse("1x2"), sparse_gradients=True)
    assert (lane, lane.reason) == (GLOO_CUDA, "NCCL cannot all-reduce sparse gradients")
    shared = choose(parse("2x2"), sparse_gradients=True, may_fall_back=False)
    assert shared.reason == "NCCL cannot all-reduce sparse gradients; ranks share GPUs"
    assert shared.ranks_share_gpus
    assert choose(parse("1x2")) == NCCL
    gpus(0)
    assert choose(parse("1x2"), sparse_gradients=True).name == "gloo_fallback"


def test_lanes_that_differ_in_their_reason_share_ranks() -> None:
    assert Lane("gloo_cuda", "gloo", "cuda", "ranks share GPUs") == GLOO_CUDA


def test_what_a_machine_lacks_is_told_apart_from_a_mistake(gpus: Callable[[int], None]) -> None:
    gpus(1)
    with pytest.raises(CannotRunHere) as caught:
        check(Case(model="mlp", loss="mse_mean", layout="1x2"), "data_parallel")
    error = pickle.loads(pickle.dumps(caught.value))
    told = (error.subject, error.lane, error.layout, error.reason)
    assert told == ("data_parallel", "data_parallel", "1x2", "needs 2 CUDA devices, found 1")
    assert str(error) == str(caught.value)
    with pytest.raises(BadCase) as mistake:
        choose(parse("1x2"), "mpi")
    assert not isinstance(mistake.value, CannotRunHere)


def test_ranks_that_drive_several_gpus_each_see_only_these(gpus: Callable[[int], None]) -> None:
    gpus(2)
    lane = Lane("nccl", "nccl", "cuda", gpus_per_rank=2)
    for layout in ("1x2", "2x1"):
        visible = visible_devices(parse(layout), lane, EIGHT)
        seen = [name for names in visible.values() for name in names.split(",")]
        assert [len(names.split(",")) for names in visible.values()] == [2, 2]
        assert len(set(seen)) == 4
        assert device_of(1, lane, visible[1]).index == 0
    assert missing("nccl", 2, 2) == "needs 4 CUDA devices (2 for each rank), found 2"
    assert missing("nccl", 2) is None
