"""NCCL counts every simulated node as a host, unless the user has chosen otherwise."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import nn

from ddp_equivalence import Rank, check
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.environment import nccl_defaults
from ddp_equivalence.ranks.lanes import missing
from ddp_equivalence.ranks.nccl import nodes_counted, read_nodes
from tests.package.own_cases import own_case, right_step

LINE = "host:{pid}:{pid} [0] NCCL INFO comm 0x55 rank {rank} nRanks {ranks} nNodes {nodes}"
"""The beginning of a line that each rank writes for each of its communicators."""

TOO_FEW_GPUS = missing("nccl", 2)


def line(rank: int, ranks: int, nodes: int) -> str:
    text = LINE.format(pid=100 + rank, rank=rank, ranks=ranks, nodes=nodes)
    return f"{text} localRanks 1 localRank 0 MNNVL 0"


OF_NCCL = ("NCCL_HOSTID", "NCCL_NET", "NCCL_SOCKET_IFNAME")
OF_TORCH = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)


def prints_its_environment(model: nn.Module, shard: Any, rank: Rank) -> None:
    print([os.environ.get(name) for name in (*OF_NCCL, *OF_TORCH)])
    right_step(model, shard, rank)


def test_ranks_of_one_node_have_the_same_host_for_nccl() -> None:
    defaults = [nccl_defaults(row, False) for row in parse("1+2").rows]
    assert [one["NCCL_HOSTID"] for one in defaults] == [
        "simulated node 0",
        "simulated node 1",
        "simulated node 1",
    ]
    assert {one["NCCL_NET"] for one in defaults} == {"Socket"}
    (one_node,) = {tuple(nccl_defaults(row, False).items()) for row in parse("1x4").rows}
    assert one_node == (("NCCL_SOCKET_IFNAME", "lo"),)


def test_ranks_that_share_gpus_have_a_host_each_for_nccl() -> None:
    defaults = [nccl_defaults(row, True) for row in parse("1+2").rows]
    assert [one["NCCL_HOSTID"] for one in defaults] == ["rank 0", "rank 1", "rank 2"]
    assert {(one["NCCL_NET"], one["NCCL_SOCKET_IFNAME"]) for one in defaults} == {("Socket", "lo")}


def test_ranks_on_gloo_get_no_variables_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch let a rank end long before the deadline of its case, and write no file."""
    for name in OF_NCCL:
        monkeypatch.delenv(name, raising=False)
    verdict = check(own_case(layout="2x1"), prints_its_environment, backend="gloo")
    assert verdict.outcome == "same"
    assert set(verdict.output.values()) == {"[None, None, None, '1', '0', '250']\n"}


@pytest.mark.parametrize("name", [OF_TORCH[0], "NCCL_SOCKET_IFNAME"])
def test_what_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    verdict = check(own_case(), prints_its_environment)
    assert verdict.outcome == "same"
    assert all("'3'" in text for text in verdict.output.values()), verdict.output


def test_ranks_are_started_with_what_libraries_read_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"

    def prints(model: nn.Module, shard: Any, rank: Rank) -> None:
        print(f"{os.getpid()} {os.environ.get(name)}")
        right_step(model, shard, rank)

    seen = []
    for value in ("1", "2"):
        monkeypatch.setenv(name, value)
        verdict = check(own_case(), prints)
        assert verdict.outcome == "same"
        seen.append(verdict.output[0].split())
    assert [value for _, value in seen] == ["1", "2"]
    assert seen[0][0] != seen[1][0], "the ranks were used again, which had read the old value"


def test_the_nodes_are_read_from_the_log_of_nccl() -> None:
    two = [line(rank, 4, 2) for rank in range(4)]
    assert read_nodes([*two, line(0, 2, 1), "another line"], world_size=4) == 2
    assert read_nodes([*two, line(3, 4, 1)], world_size=4) is None
    assert read_nodes(["another line"], world_size=4) is None


@pytest.mark.skipif(TOO_FEW_GPUS is not None, reason=f"NCCL {TOO_FEW_GPUS}")
def test_nccl_counts_the_nodes_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes_counted(parse("2x1")) == 2
    assert nodes_counted(parse("1x2")) == 1
    monkeypatch.setenv("NCCL_HOSTID", "one host")
    assert nodes_counted(parse("2x1")) == 1
