"""Tests that ``test_rehearsed.py`` runs on four pretended GPUs: which GPUs a report names.

Pytest collects this file only where it is named.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case.random_state import seeded
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import own_case, right_step

pytestmark = pytest.mark.self_check


def test_every_rank_names_its_own_gpu_and_the_precision() -> None:
    verdict = check(own_case(layout="2x2"), right_step)
    assert verdict.outcome == "same", str(verdict)
    gpus = [verdict.evidence[rank].gpu for rank in range(4)]
    assert len(set(gpus)) == 4
    assert all(gpu.startswith("GPU-") for gpu in gpus)
    report = " ".join(verdict.full_report().split())
    assert f"rank 3 on {gpus[3][:12]}" in report
    assert "TF32 off for products and convolutions of float32" in report


def all_on_one_gpu(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    properties: Any = lambda device: SimpleNamespace(uuid="1234")  # noqa: E731
    torch.cuda.get_device_properties = properties


def test_ranks_that_share_a_gpu_show_nothing() -> None:
    verdict = check(own_case(), all_on_one_gpu, fresh_ranks=True)
    assert verdict.outcome == "unknown"
    assert verdict.unknown_because is not None
    assert verdict.unknown_because.value == "ranks_share_a_gpu"


def prints_its_host(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(os.environ["NCCL_HOSTID"])
    right_step(model, shard, rank)


def test_simulated_nodes_are_hosts_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_ids() == ["simulated node 0"] * 1 + ["simulated node 1"] * 2
    monkeypatch.setenv("NCCL_HOSTID", "one")
    assert host_ids() == ["one"] * 3


def host_ids() -> list[str]:
    verdict = check(own_case(layout="1+2"), prints_its_host, backend="nccl")
    assert verdict.outcome == "same", str(verdict)
    return [verdict.output[rank].strip() for rank in range(3)]


def test_two_replicas_run_inside_each_rank() -> None:
    for layout in ("1x2", "2x1"):
        case = Case(model="mlp", loss="mse_mean", layout=layout)
        verdict = check(case, "hybrid_data_parallel")
        assert verdict.outcome == "same", str(verdict)
        assert [one.notes["replicas"] for one in verdict.evidence.values()] == [2, 2]
        gpus = [gpu for one in verdict.evidence.values() for gpu in one.gpu.split("+")]
        assert len(set(gpus)) == 4


def test_rank_0_in_this_process_leaves_the_group() -> None:
    verdict = check(own_case(), right_step, in_process=True)
    assert verdict.outcome == "same", str(verdict)
    warm_ranks().stop()
    assert not dist.is_initialized()


def test_all_devices_are_seeded() -> None:
    torch.cuda.init()
    drawn = []
    for _ in range(2):
        with seeded(7):
            drawn.append([torch.rand(3, device=f"cuda:{gpu}") for gpu in range(2)])
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1]), "replicas on other devices were not seeded"
