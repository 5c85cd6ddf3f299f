"""Reports name the physical GPUs, and ranks that were meant to have one each have one each."""

from __future__ import annotations

from pathlib import Path

from tests.gpu_rehearsal.rehearsal import rehearse

TESTS = """
import os
from types import SimpleNamespace
import torch
import torch.distributed as dist
from ddp_equivalence import Case, check
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import own_case, right_step

def test_every_rank_names_its_own_gpu_and_the_precision():
    verdict = check(own_case(layout="2x2"), right_step)
    assert verdict.outcome == "same", str(verdict)
    gpus = [verdict.evidence[rank].gpu for rank in range(4)]
    assert len(set(gpus)) == 4
    assert all(gpu.startswith("GPU-") for gpu in gpus)
    report = " ".join(verdict.full_report().split())
    assert f"rank 3 on {gpus[3][:12]}" in report
    assert "TF32 off for products and convolutions of float32" in report

def all_on_one_gpu(model, shard, rank):
    right_step(model, shard, rank)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="1234")

def test_ranks_that_share_a_gpu_show_nothing():
    verdict = check(own_case(), all_on_one_gpu, fresh_ranks=True)
    assert verdict.outcome == "unknown"
    assert verdict.unknown_because.value == "ranks_share_a_gpu"

def prints_its_host(model, shard, rank):
    print(os.environ["NCCL_HOSTID"])
    right_step(model, shard, rank)

def test_simulated_nodes_are_hosts_for_nccl(monkeypatch):
    assert host_ids() == ["simulated node 0"] * 1 + ["simulated node 1"] * 2
    monkeypatch.setenv("NCCL_HOSTID", "one")
    assert host_ids() == ["one"] * 3

def host_ids():
    verdict = check(own_case(layout="1+2"), prints_its_host, backend="nccl")
    assert verdict.outcome == "same", str(verdict)
    return [verdict.output[rank].strip() for rank in range(3)]

def test_two_replicas_run_inside_each_rank():
    for layout in ("1x2", "2x1"):
        case = Case(model="mlp", loss="mse_mean", layout=layout)
        verdict = check(case, "hybrid_data_parallel")
        assert verdict.outcome == "same", str(verdict)
        assert [one.notes["replicas"] for one in verdict.evidence.values()] == [2, 2]
        gpus = [gpu for one in verdict.evidence.values() for gpu in one.gpu.split("+")]
        assert len(set(gpus)) == 4

def test_rank_0_in_this_process_leaves_the_group():
    verdict = check(own_case(), right_step, in_process=True)
    assert verdict.outcome == "same", str(verdict)
    warm_ranks().stop()
    assert not dist.is_initialized()
"""


def test_reports_name_the_gpus_that_the_ranks_had(tmp_path: Path) -> None:
    (tmp_path / "test_reports.py").write_text(TESTS)
    options = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider")
    rehearsed = rehearse("pytest", *options, gpus=4, folder=tmp_path)
    assert "5 passed" in rehearsed.output, rehearsed.output
