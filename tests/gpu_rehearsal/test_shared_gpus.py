"""One GPU is enough: ranks of NCCL that share it, and several replicas of nn.DataParallel on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import Rehearsed, rehearse

QUIET = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider")

TESTS = """
import os
import pytest
from ddp_equivalence import BadCase, Case, check
from tests.package.own_cases import own_case, right_step

def prints_its_host(model, shard, rank):
    print(os.environ["NCCL_HOSTID"], os.environ["NCCL_NET"])
    right_step(model, shard, rank)

def test_ranks_share_the_gpu_and_the_report_says_so():
    verdict = check(own_case(layout="2x2"), prints_its_host)
    assert verdict.outcome == "same", str(verdict)
    assert verdict.lane.name == "nccl_shared"
    assert [verdict.output[rank].strip() for rank in range(4)] == [
        f"rank {rank} Socket" for rank in range(4)
    ]
    report = " ".join(verdict.full_report().split())
    assert "nccl_shared (4 ranks share GPU 0 over sockets)" in report
    assert "ranks 0, 1, 2, 3 on GPU-00000000" in report

def test_nccl_is_refused_and_names_the_lane_that_can():
    with pytest.raises(BadCase, match="found 1, for layout 1x2; nccl_shared can run it"):
        check(own_case(), right_step, backend="nccl")

@pytest.mark.parametrize(("layout", "replicas"), [("1x2", 2), ("1x4", 4)])
def test_replicas_share_the_device(layout, replicas):
    case = Case(model="mlp", loss="mse_mean", layout=layout)
    verdict = check(case, "data_parallel")
    assert verdict.outcome == "same", str(verdict)
    assert verdict.lane.name == "data_parallel_shared"
    assert verdict.evidence[0].notes["replicas"] == replicas
    report = " ".join(verdict.full_report().split())
    assert f"{replicas} replicas ran" in report
    assert f"data_parallel_shared ({replicas} replicas on one device)" in report

@pytest.mark.parametrize("layout", ["1x2", "2x1"])
def test_replicas_share_the_device_inside_each_rank(layout):
    verdict = check(Case(model="mlp", loss="mse_mean", layout=layout), "hybrid_data_parallel")
    assert verdict.outcome == "same", str(verdict)
    assert [one.notes["replicas"] for one in verdict.evidence.values()] == [2, 2]
    assert "2 ranks share GPU 0 over sockets, with 2 replicas on one device each" in " ".join(
        verdict.full_report().split()
    )

def test_one_replica_shows_nothing():
    one_row = Case(model="mlp", loss="mse_mean", layout="1x2", shards="1+0", examples=1)
    verdict = check(one_row, "data_parallel")
    assert verdict.outcome == "unknown"
    assert "data_parallel did not really run: it needs 2 replicas and had 1" in verdict.reason
"""


def test_everything_runs_on_one_gpu_and_says_how(tmp_path: Path) -> None:
    (tmp_path / "test_shared.py").write_text(TESTS)
    rehearsed = rehearse("pytest", *QUIET, gpus=1, folder=tmp_path)
    assert "7 passed" in rehearsed.output, rehearsed.output
    assert not rehearsed.initialised_by_no_rank()


DUPLICATES = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def rank_main(rank, hosts, subgroup):
    os.environ["NCCL_HOSTID"] = hosts[rank]
    torch.cuda.set_device(0)
    backend, store = "gloo" if subgroup else "nccl", f"file://{os.getcwd()}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    if subgroup:
        dist.new_group([0, 1], backend="nccl")
    print("connected")

if __name__ == "__main__":
    mp.spawn(rank_main, (sys.argv[1].split(","), len(sys.argv) > 2), nprocs=2)
"""


@pytest.mark.parametrize(
    ("arguments", "refused"), [(["a,a"], True), (["a,a", "subgroup"], True), (["a,b"], False)]
)
def test_nccl_refuses_two_ranks_of_one_host_on_one_gpu(
    arguments: list[str], refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "duplicates.py").write_text(DUPLICATES)
    rehearsed = rehearse("duplicates", *arguments, gpus=1, folder=tmp_path)
    text = "Duplicate GPU detected : rank {} and rank {} both on CUDA device 1000"
    said = [text.format(*ranks) in rehearsed.output for ranks in ((0, 1), (1, 0))]
    assert any(said) == refused, rehearsed.output
    assert ("DistBackendError: NCCL error in" in rehearsed.output) == refused
    assert rehearsed.output.count("connected") == (0 if refused else 2)


FEW = (
    *("run", "-p", "no:randomly", "-p", "no:cacheprovider", "tests/equivalence/test_ddp.py"),
    *("-k", "test_ddp_mean and mlp-mse_mean and equal-float64 and not steps and not update"),
)


def run(*options: str, gpus: int = 1) -> Rehearsed:
    ran = rehearse("ddp_equivalence", *FEW, *options, gpus=gpus)
    assert ran.returncode == 0, ran.output
    return ran


def test_more_workers_than_gpus_start_no_more_ranks() -> None:
    alone, asked_for_three = run(), run("-n", "3")
    why = "ranks of several workers would wait in turn for the same GPU"
    line = f"-n 3 became one process, as there is one GPU: {why}"
    assert line in asked_for_three.output
    assert "became" not in alone.output
    assert len(asked_for_three.contexts) == len(alone.contexts) > 8
    on_two = rehearse("ddp_equivalence", *FEW, "-n", "3", "--plan", gpus=2)
    assert f"-n 3 became -n 2, one worker for each GPU: {why}" in on_two.output
