"""Runs of the suite and of its commands, on machines that seem to have 1, 2, 4 or 8 GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_equivalence.strategies import catalogue
from tests.gpu_rehearsal.rehearsal import rehearse

WITHOUT = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider")

SAYS_SO = "REHEARSED on"


def _one_case_of_each_layout() -> list[catalogue.Trial]:
    """Trials with one model and one loss; two of them are for gloo with CUDA tensors."""
    return [
        trial
        for trial in catalogue.trials("ddp_mean")
        if trial.cause is None
        and str(trial.case).startswith("mlp-mse_mean-")
        and "equal-float64" in str(trial.case)
        if trial.steps == 1 and trial.compare == "gradients" and not trial.case.exact
    ]


FILES = ("tests/equivalence/test_ddp.py", "tests/equivalence/test_data_parallel.py")

SELECTED = (
    "(test_ddp_mean or test_data_parallel_gives) and [mlp-mse_mean- and equal-float64 "
    "and not steps and not update"
)


@pytest.mark.parametrize(("gpus", "strict"), [(1, False), (2, False), (4, False), (8, True)])
def test_each_layout_runs_and_ranks_share_gpus_where_there_are_too_few(
    gpus: int, strict: bool
) -> None:
    trials = _one_case_of_each_layout()
    on_nccl = [trial for trial in trials if trial.backend is None]
    runs = [trial for trial in on_nccl if trial.case.ranks.world_size <= gpus]
    command = ("pytest", *WITHOUT, *FILES, "-k", SELECTED, "--must-run", "nccl")
    rehearsed = rehearse(*command, gpus=gpus, strict=strict)
    assert rehearsed.returncode == 0, rehearsed.output
    compared = dict(re.findall(r"^lane (\w+): (\d+) cases? compared", rehearsed.output, re.M))
    assert int(compared["nccl"]) == len(runs)
    assert int(compared.get("nccl_shared", 0)) == len(on_nccl) - len(runs)
    assert int(compared["gloo_cuda"]) == len(trials) - len(on_nccl)
    assert ("data_parallel" in compared) == (gpus > 1)
    assert ("data_parallel_shared" in compared) == (gpus < 8)
    assert "NOT RUN" not in rehearsed.output
    assert {context.gpu for context in rehearsed.contexts} == set(range(gpus))
    assert not rehearsed.initialised_by_no_rank()
    assert SAYS_SO in rehearsed.output


OWN = """
import os
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddp_equivalence import Case

def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])

case = Case(
    model=lambda: nn.Linear(5, 3),
    batch=lambda g: {"x": torch.randn(8, 5, generator=g), "y": torch.randn(8, 3, generator=g)},
    loss=loss,
    layout="1x2",
)

def step(model, shard, rank):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    ddp = DistributedDataParallel(model.cuda(local), device_ids=[local])
    loss(ddp, {name: one.cuda(non_blocking=True) for name, one in shard.items()}).backward()

def mixes(model, shard, rank):
    ddp = DistributedDataParallel(model.cuda(rank.local_rank), device_ids=[rank.local_rank])
    loss(ddp, {name: one.cpu() for name, one in shard.items()}).backward()
"""


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("mine.py", 0, "step is big_batch: same"),
        # DDP moves the inputs to the rank's GPU, and nothing moves the targets.
        ("mine.py:mixes", 3, "Expected all tensors to be on the same device"),
    ],
)
def test_a_users_step_that_calls_cuda_is_checked(
    name: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    rehearsed = rehearse("ddp_equivalence", "check", name, gpus=2, strict=True, folder=tmp_path)
    assert rehearsed.returncode == code, rehearsed.output
    assert " ".join(said.split()) in " ".join(rehearsed.output.split())
    assert "nccl, torch 2." in rehearsed.output
    assert "+rehearsed" in rehearsed.output


OWN_CODE = (
    "test_a_right_step_is_the_big_batch_for_any_model or "
    "(test_a_planted_fault and 1x2 and (sum_not_mean or no_all_reduce or averaged_twice))"
)


def test_right_code_is_right_and_planted_faults_are_found() -> None:
    files = ("equivalence/test_right_code_under_ddp.py", "diagnosis/test_planted_faults.py")
    paths = [f"tests/{file}" for file in files]
    rehearsed = rehearse("pytest", *WITHOUT, *paths, "-k", OWN_CODE, gpus=4)
    assert rehearsed.returncode == 0, rehearsed.output
    assert "planted faults                 3 of 3 caught, 3 of 3 named" in rehearsed.output


SEEDS = """
import torch
from ddp_equivalence.case.random_state import seeded

torch.cuda.init()
drawn = []
for _ in range(2):
    with seeded(7):
        drawn.append([torch.rand(3, device=f"cuda:{gpu}") for gpu in range(2)])
assert torch.equal(drawn[0][0], drawn[1][0])
assert torch.equal(drawn[0][1], drawn[1][1]), "replicas on other devices were not seeded"
"""


def test_all_devices_are_seeded(tmp_path: Path) -> None:
    (tmp_path / "seeds.py").write_text(SEEDS)
    rehearsed = rehearse("seeds", gpus=2, folder=tmp_path)
    assert rehearsed.returncode == 0, rehearsed.output
