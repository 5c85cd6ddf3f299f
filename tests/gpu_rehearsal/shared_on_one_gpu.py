"""Tests that ``test_rehearsed.py`` runs on one pretended GPU, which ranks and replicas share.

Pytest collects this file only where it is named.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import nn

from ddp_equivalence import BadCase, Case, Rank, check
from tests.package.own_cases import own_case, right_step

pytestmark = pytest.mark.self_check


def prints_its_host(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(os.environ["NCCL_HOSTID"], os.environ["NCCL_NET"])
    right_step(model, shard, rank)


def test_ranks_share_the_gpu_and_the_report_says_so() -> None:
    verdict = check(own_case(layout="2x2"), prints_its_host)
    assert verdict.outcome == "same", str(verdict)
    assert verdict.lane.name == "nccl_shared"
    hosts = [verdict.output[rank].strip() for rank in range(4)]
    assert hosts == [f"rank {rank} Socket" for rank in range(4)]
    report = " ".join(verdict.full_report().split())
    assert "nccl_shared (4 ranks share GPU 0 over sockets)" in report
    assert "ranks 0, 1, 2, 3 on GPU-00000000" in report


def test_nccl_is_refused_and_names_the_lane_that_can() -> None:
    with pytest.raises(
        BadCase, match=r"nccl_shared, whose ranks share GPUs: nccl needs 2 .*found 1"
    ):
        check(own_case(), right_step, backend="nccl")


@pytest.mark.parametrize(("layout", "replicas"), [("1x2", 2), ("1x4", 4)])
def test_replicas_share_the_device(layout: str, replicas: int) -> None:
    case = Case(model="mlp", loss="mse_mean", layout=layout)
    verdict = check(case, "data_parallel")
    assert verdict.outcome == "same", str(verdict)
    assert verdict.lane.name == "data_parallel_shared"
    assert verdict.evidence[0].notes["replicas"] == replicas
    report = " ".join(verdict.full_report().split())
    assert f"{replicas} replicas ran" in report
    assert f"data_parallel_shared ({replicas} replicas on one device)" in report


def test_replicas_share_the_device_inside_each_rank() -> None:
    verdict = check(Case(model="mlp", loss="mse_mean", layout="2x1"), "hybrid_data_parallel")
    assert verdict.outcome == "same", str(verdict)
    assert [one.notes["replicas"] for one in verdict.evidence.values()] == [2, 2]
    report = " ".join(verdict.full_report().split())
    assert "2 ranks share GPU 0 over sockets, with 2 replicas on one device each" in report


def test_one_replica_shows_nothing() -> None:
    one_row = Case(model="mlp", loss="mse_mean", layout="1x2", shards="1+0", examples=1)
    verdict = check(one_row, "data_parallel")
    assert verdict.outcome == "unknown"
    assert "data_parallel did not really run: it needs 2 replicas and had 1" in verdict.reason
