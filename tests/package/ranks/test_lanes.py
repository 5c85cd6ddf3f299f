"""Which lane a case gets, and which GPUs its ranks get there."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import pytest

from ddp_equivalence import BadCase, Case, check
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.measurement.request import lane_of
from ddp_equivalence.ranks.gpus import Gpu
from ddp_equivalence.ranks.lanes import (
    CannotRunHere,
    Lane,
    choose,
    device_of,
    devices_of_ranks,
    missing,
    visible_devices,
)
from ddp_equivalence.strategies import STRATEGIES
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


def test_layouts_with_few_ranks_use_all_eight_gpus() -> None:
    few = [parse(layout) for layout in LAYOUTS if parse(layout).world_size < 8]
    used = {gpu for layout in few for gpu in devices_of_ranks(layout, NCCL, EIGHT).values()}
    assert used == set(EIGHT)


@pytest.mark.parametrize("layout", [*LAYOUTS, EIGHT_GPUS, "1+2"])
@pytest.mark.parametrize(
    ("count", "lane"), [(1, NCCL), (2, GLOO_CUDA), (3, NCCL), (4, GLOO_CUDA), (8, NCCL)]
)
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


def test_what_a_machine_lacks_is_told_apart_from_a_mistake(gpus: Callable[[int], None]) -> None:
    gpus(0)
    with pytest.raises(CannotRunHere) as caught:
        check(Case(model="mlp", loss="mse_mean", layout="1x2"), "data_parallel")
    error = pickle.loads(pickle.dumps(caught.value))
    told = (error.subject, error.lane, error.layout, error.reason)
    assert told == ("data_parallel", "data_parallel", "1x2", "needs 2 CUDA devices, found 0")
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
    assert missing("nccl", 2) is None
    assert missing("nccl", 2, 2) == "needs 4 CUDA devices (2 for each rank), found 2"


@pytest.mark.parametrize(
    ("count", "layout", "name", "reason"),
    [
        (0, "1x2", "gloo_fallback", "needs 2 CUDA devices (one rank each), found 0"),
        (1, "1x1", "nccl", ""),
        (1, "2x2", "nccl_shared", "4 ranks share GPU 0 over sockets"),
        (3, "1x4", "nccl_shared", "4 ranks share 3 GPUs over sockets"),
        (4, "2x2", "nccl", ""),
    ],
)
def test_ranks_share_gpus_if_there_are_fewer(
    gpus: Callable[[int], None], count: int, layout: str, name: str, reason: str
) -> None:
    gpus(count)
    lane = choose(parse(layout))
    assert (lane.name, lane.reason) == (name, reason)
    assert lane.ranks_share_gpus == (name == "nccl_shared")
    assert name == "gloo_fallback" or choose(parse(layout), may_fall_back=False) == lane


def test_each_lane_of_nccl_is_refused_where_the_other_runs(gpus: Callable[[int], None]) -> None:
    gpus(2)
    with pytest.raises(
        CannotRunHere, match=r"nccl_shared, whose ranks share GPUs: nccl needs 4 .*found 2"
    ):
        choose(parse("1x4"), "nccl")
    enough = "more ranks than CUDA devices (with one for each, nccl runs), found 2"
    with pytest.raises(CannotRunHere, match=re.escape(enough)):
        choose(parse("1x2"), "nccl_shared")
    assert choose(parse("1x4"), "nccl_shared").backend == "nccl"


@pytest.mark.parametrize(
    ("gpu", "variable", "why"),
    [
        (Gpu(0, compute_mode="exclusive_process"), "", "EXCLUSIVE_PROCESS: one process each"),
        (Gpu(0, mig=True), "", "MIG: nobody has tried ranks of NCCL that share an instance"),
        (
            Gpu(0, memory_total=4 * 2**30),
            "",
            "8 ranks on one GPU take about 4.7 GiB, and it has 4.0",
        ),
        (Gpu(0), "one", "NCCL_HOSTID is set, so NCCL takes all ranks for ranks of one host"),
    ],
)
def test_what_keeps_ranks_from_sharing_is_the_reason_of_the_fallback(
    gpus: Callable[[int], None], gpu: Gpu, variable: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1)
    monkeypatch.setattr(
        "ddp_equivalence.ranks.gpus.gpus_by_name", lambda devices: dict.fromkeys(devices, gpu)
    )
    if variable:
        monkeypatch.setenv("NCCL_HOSTID", variable)
    reason = f"needs 8 CUDA devices ({why}), found 1"
    lane = choose(parse("1x8"))
    assert (lane.name, lane.reason) == ("gloo_fallback", reason)
    for options in ({"backend": "nccl_shared"}, {"may_fall_back": False}):
        with pytest.raises(CannotRunHere) as caught:
            choose(parse("1x8"), **options)
        assert (caught.value.lane, caught.value.reason) == ("nccl_shared", reason)


@pytest.mark.parametrize(
    ("count", "layout", "strategy", "name", "reason"),
    [
        (1, "1x2", "data_parallel", "data_parallel_shared", "2 replicas on one device"),
        (3, "1x4", "data_parallel", "data_parallel_shared", "4 replicas on one device"),
        (2, "1x2", "data_parallel", "data_parallel", ""),
        (
            *(1, "1x2", "hybrid_data_parallel", "nccl_shared"),
            "2 ranks share GPU 0 over sockets, with 2 replicas on one device each",
        ),
        (4, "1x2", "hybrid_data_parallel", "nccl", ""),
    ],
)
def test_replicas_share_a_device_if_there_are_fewer(
    gpus: Callable[[int], None], count: int, layout: str, strategy: str, name: str, reason: str
) -> None:
    gpus(count)
    case = Case(model="mlp", loss="mse_mean", layout=layout)
    lane = lane_of(case, STRATEGIES[strategy], "auto", ())
    assert (lane.name, lane.reason) == (name, reason)
    seen = [one.split(",") for one in visible_devices(parse(layout), lane, EIGHT[:count]).values()]
    assert name != "nccl_shared" or all(len(one) == 1 for one in seen)


@pytest.mark.parametrize(
    ("count", "backend", "reason"),
    [
        (0, "auto", "needs 2 CUDA devices (one rank each), found 0"),
        (2, "gloo", "needs CUDA devices, and gloo computes on the CPU"),
    ],
)
def test_a_strategy_that_needs_gpus_does_not_fall_back_to_the_cpu(
    gpus: Callable[[int], None], count: int, backend: str, reason: str
) -> None:
    gpus(count)
    case = Case(model="batch_norm", loss="mse_mean", layout="1x2")
    with pytest.raises(CannotRunHere) as caught:
        lane_of(case, STRATEGIES["sync_batch_norm"], backend, ())
    assert (caught.value.lane, caught.value.reason) == ("nccl", reason)
    gpus(1)
    assert lane_of(case, STRATEGIES["sync_batch_norm"], "auto", ()).name == "nccl_shared"
