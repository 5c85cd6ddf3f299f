"""What a machine with few GPUs cannot run is NOT RUN with its reason, and all the rest runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_rehearsal.rehearsal import Rehearsed, rehearse

LANES = ("--must-run=nccl", "--must-run=data_parallel")
CANNOT_SHARE = {"NCCL_HOSTID": "one"}
"""With this variable NCCL sees one host, so that its ranks cannot share GPUs."""

CHOSEN = (
    "tests/equivalence/test_ddp.py",
    "tests/equivalence/test_data_parallel.py",
    "tests/equivalence/test_right_code.py",
    "tests/diagnosis/test_planted_faults.py",
)

OWN_CODE = "tiny_buckets and float64"
PLANTED = "planted and sum_not_mean-ddp_mean-mlp-mse_mean and float64"
SPARSE = "ddp_global_mean and sparse_embedding-token_sum"
ONE_PAIR = " or ".join(
    f"mlp-mse_mean-{case}"
    for case in (
        "1x1-equal-float64-nccl",
        "1x2-equal-float64-nccl",
        "1x2-equal-float64-nccl_shared",
        "1x2-equal-float64-data_parallel",
    )
)

USERS_STEP = """
import os, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddp_equivalence import Case, assert_equivalent

def loss(model, batch):
    return nn.functional.mse_loss(model(batch["rows"]), batch["targets"])

def make_batch(generator):
    return {name: torch.randn(16, 3, generator=generator) for name in ("rows", "targets")}

case = Case(model=lambda: nn.Linear(3, 3), batch=make_batch, loss=loss, layout="2x2")

def step(model, shard, rank):
    local_rank = int(os.environ["LOCAL_RANK"])
    model = DistributedDataParallel(model.cuda(local_rank), device_ids=[local_rank])
    loss(model, {name: values.cuda(local_rank) for name, values in shard.items()}).backward()

def test_the_step():
    assert_equivalent(case, step)
"""


def suite(
    gpus: int, *choice: str, lanes: Sequence[str] = LANES, files: Sequence[str] = CHOSEN, **how: Any
) -> Rehearsed:
    """Run the chosen tests of the suite on this number of GPUs. ``choice``: joined by ``or``."""
    command = ("pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *lanes, *files)
    return rehearse(*command, "-k", " or ".join(f"({one})" for one in choice), gpus=gpus, **how)


def test_two_gpus_run_what_they_can_and_are_green(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    lanes = (*LANES, f"--ddp-json={results}")
    rehearsed = suite(2, OWN_CODE, PLANTED, SPARSE, ONE_PAIR, lanes=lanes, environment=CANNOT_SHARE)
    assert rehearsed.returncode == 0, rehearsed.output
    content = json.loads(results.read_text())
    compared = {(case["strategy"], case["layout"], case["backend"]) for case in content["cases"]}
    assert {
        ("ddp_mean", "1x1", "nccl"),
        ("ddp_mean", "1x2", "nccl"),
        ("ddp_global_mean", "2x2", "gloo_cuda"),
        ("data_parallel", "1x2", "data_parallel"),
    } <= compared
    assert not any(backend == "gloo_fallback" for _, _, backend in compared)
    why = "NCCL_HOSTID is set, so NCCL takes all ranks for ranks of one host"
    needs = f"needs 4 CUDA devices ({why}), found 2"
    not_run = {(one["what"], one["reason"]) for one in content["not_run"]}
    assert ("tiny_buckets on 2x2 (nccl_shared)", needs) in not_run
    assert ("ddp_mean on 2x2 (nccl_shared)", needs) in not_run  # a planted fault
    assert any(
        line.startswith("tiny_buckets") and "NOT RUN" in line and needs in line
        for line in rehearsed.output.splitlines()
    ), rehearsed.output
    sparse = {case["lane_reason"] for case in content["cases"] if "sparse" in case["id"]}
    assert sparse == {"NCCL cannot all-reduce sparse gradients; ranks share GPUs"}
    assert not rehearsed.initialised_by_no_rank()


@pytest.mark.thorough
def test_a_lane_whose_ranks_never_start_fails_once() -> None:
    rehearsed = suite(1, "ddp_mean and 1x1", lanes=(), files=CHOSEN[:1], lost=0)
    assert rehearsed.returncode == 1, rehearsed.output
    assert "1 failed, 5 skipped" in rehearsed.output, rehearsed.output
    assert "no ranks have ever started on this lane: " in rehearsed.output
    assert "unspecified launch failure" in rehearsed.output


@pytest.mark.thorough
def test_nvml_that_cannot_initialise_is_a_reason_and_no_error_of_collection() -> None:
    environment = {"PRETEND_NVML": "mismatch"}
    rehearsed = suite(2, ONE_PAIR, lanes=(), files=CHOSEN[:2], environment=environment)
    assert rehearsed.returncode == 0, rehearsed.output
    assert "needs 2 CUDA devices, found 0 (Can't initialize NVML; " in rehearsed.output
    assert not rehearsed.initialised_by_no_rank()


@pytest.mark.thorough
def test_a_users_own_test_stays_red_on_a_lane_that_must_run(tmp_path: Path) -> None:
    """Where ranks can share GPUs, the test passes, and the run fails: nothing ran on ``nccl``."""
    (tmp_path / "test_theirs.py").write_text(USERS_STEP)
    command = ("pytest", "-q", "--must-run=nccl")
    rehearsed = rehearse(*command, gpus=2, folder=tmp_path, environment=CANNOT_SHARE)
    assert rehearsed.returncode == 1, rehearsed.output
    assert "needs 4 CUDA devices (NCCL_HOSTID is set" in rehearsed.output
    assert "1 failed" in rehearsed.output
    on_its_own_gpu = USERS_STEP.replace('int(os.environ["LOCAL_RANK"])', "0")
    (tmp_path / "test_theirs.py").write_text(on_its_own_gpu)
    shared = rehearse(*command, gpus=2, folder=tmp_path)
    assert shared.returncode == 1, shared.output
    assert "1 passed" in shared.output
    assert "--must-run nccl: FAILED, nothing was compared on this lane" in shared.output


@pytest.mark.thorough
def test_a_step_that_asks_for_a_gpu_on_the_cpu_reads_why_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(USERS_STEP)
    command = ("ddp_equivalence", "check", str(file))
    rehearsed = rehearse(*command, gpus=2, environment=CANNOT_SHARE)
    assert "No CUDA GPUs are available" in rehearsed.output
    text = " ".join(rehearsed.output.split())
    assert (
        "NCCL needs 4 CUDA devices (NCCL_HOSTID is set, so NCCL takes all ranks for ranks" in text
    )
    assert "of one host), found 2, so the ranks ran on the CPU" in text
    assert "--backend gloo_cuda" in text
