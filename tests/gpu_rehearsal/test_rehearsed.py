"""The suite, its commands, and tests written for GPUs, on machines that seem to have GPUs.

Every rehearsal starts pytest and imports torch anew, so each of them answers many questions: the
files ``*_on_gpus.py`` and ``*_on_one_gpu.py`` have tests that run there. In every change run those
of the numbers, of the plan, and one of each file beside this one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_equivalence.strategies import catalogue
from tests.gpu_rehearsal.rehearsal import ROOT, rehearse

PYTEST = ("pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider")
HERE = "tests/gpu_rehearsal"

ON_FOUR_GPUS = (
    *(f"{HERE}/{name}_on_gpus.py" for name in ("numbers", "faulty_steps", "reports")),
    "tests/equivalence/test_manual_all_reduce.py",
    "tests/difference/test_manual_all_reduce_differs.py",
    "tests/equivalence/test_ddp_options.py",
    "tests/diagnosis/test_planted_faults.py",
    "tests/package/test_own_models.py::test_no_fault_is_excused_because_the_model_has_dropout",
)
CHOSEN = (
    "(dropout-mse_mean and float64) or (sync_batch_norm and batch_norm-) or excused or "
    "(on_gpus and not limits_follow) or "
    "(test_a_planted_fault and 1x2 and (sum_not_mean or no_all_reduce or averaged_twice))"
)


def test_numbers_lines_and_reports_are_right_on_four_gpus() -> None:
    """What a collective returns is there only when somebody has waited for it."""
    rehearsed = rehearse(*PYTEST, *ON_FOUR_GPUS, "-k", CHOSEN, gpus=4, deferred=True)
    assert rehearsed.returncode == 0, rehearsed.output
    assert "43 passed" in rehearsed.output
    assert "known differences              4 of 4 differ, 4 of 4 under" in rehearsed.output
    assert "9 of 9 caught, 9 of 9 named" in rehearsed.output


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
    "((test_ddp_mean or test_data_parallel_gives) and [mlp-mse_mean- and equal-float64 "
    "and not steps and not update) or shared_on_one_gpu or limits_follow"
)

ON_ONE_GPU = f"{HERE}/shared_on_one_gpu.py"
ROUNDING = f"{HERE}/numbers_on_gpus.py::test_limits_follow_the_rounding_of_the_ranks_device"


@pytest.mark.parametrize(("gpus", "strict", "more"), [(1, False, ON_ONE_GPU), (8, True, ROUNDING)])
@pytest.mark.thorough
def test_each_layout_runs_and_ranks_share_gpus_where_there_are_too_few(
    gpus: int, strict: bool, more: str
) -> None:
    trials = _one_case_of_each_layout()
    on_nccl = [trial for trial in trials if trial.backend is None]
    runs = [trial for trial in on_nccl if trial.case.ranks.world_size <= gpus]
    command = (*PYTEST, *FILES, more, "-k", SELECTED, "--must-run", "nccl")
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
    assert "REHEARSED on" in rehearsed.output


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
"""


@pytest.mark.thorough
def test_a_users_step_that_calls_cuda_is_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    rehearsed = rehearse(
        "ddp_equivalence", "check", "mine.py", gpus=2, strict=True, folder=tmp_path
    )
    assert rehearsed.returncode == 0, rehearsed.output
    assert "step is big_batch: same" in rehearsed.output
    assert "nccl, torch 2." in rehearsed.output
    assert "+rehearsed" in rehearsed.output


def counted(lane: str, output: str) -> int:
    """The number of cases that the plan has on the lane."""
    row = re.search(rf"^  {lane} +(\d+) cases? on \d", output, re.MULTILINE)
    return int(row[1]) if row else 0


def documented(gpus: int) -> dict[str, int]:
    """Lane -> the number of cases in the table of docs/gpus.md."""
    page = (ROOT / "docs" / "gpus.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if "|" in line]
    header = next(row for row in rows if row[0].strip() == "GPUs")
    row = next(row for row in rows if row[0].strip() == str(gpus))
    return {name.strip(" `"): int(cell) for name, cell in zip(header, row, strict=True)}


def test_the_plan_needs_no_context_and_is_the_documented_one() -> None:
    planned = rehearse("ddp_equivalence", "run", "--all", "--plan", gpus=4)
    assert planned.returncode == 0, planned.output
    assert not planned.contexts
    assert not planned.log
    text, expected = planned.output, documented(4)
    assert text.count("Pretended GPU (rehearsed), compute capability") == 4
    for lane, cases in expected.items():
        assert lane == "GPUs" or counted(lane, text) == cases, lane
    assert counted("gloo_fallback", text) == 0
    assert "NOT RUN" not in text


@pytest.mark.thorough
def test_a_run_says_which_gpus_were_used_and_that_the_transport_is_not_known(
    tmp_path: Path,
) -> None:
    ran = rehearse(
        *("ddp_equivalence", "run", "-p", "no:randomly", "-p", "no:cacheprovider", "-n", "3"),
        *("--record", str(tmp_path), "tests/equivalence/test_ddp_gathered.py"),
        *("-k", "mlp-contrastive-1x2-equal-float64 and not steps"),
        gpus=2,
        environment={"NCCL_DEBUG": "WARN", "NCCL_TOPO_FILE": "/srv/site/topology"},
    )
    assert ran.returncode == 0, ran.output
    assert not ran.initialised_by_no_rank()
    why = "ranks of several workers would wait in turn for the same GPU"
    assert f"-n 3 became -n 2, one worker for each GPU: {why}" in ran.output
    rows = re.findall(r"^GPU \d, Pretended GPU \(rehearsed\) .*$", ran.output, re.MULTILINE)
    assert len(rows) == 2
    assert all(re.search(r" +\d+    [01](, 1)?$", row) for row in rows), "\n".join(rows)
    assert "NCCL's transport is not known: NCCL's log names no transport" in ran.output
    (page,) = tmp_path.iterdir()
    text = page.read_text()
    assert "NCCL_DEBUG=WARN, NCCL_TOPO_FILE=(set, not shown)" in text
    assert all(row in text for row in rows)
    assert "rehearsed" in text
    assert "GPU-0" not in text


DUPLICATES = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def rank_main(rank):
    os.environ["NCCL_HOSTID"] = "one"
    torch.cuda.set_device(0)
    store = f"file://{os.getcwd()}/store"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2)
    print("connected")

if __name__ == "__main__":
    mp.spawn(rank_main, nprocs=2)
"""


@pytest.mark.thorough
def test_nccl_refuses_two_ranks_of_one_host_on_one_gpu(tmp_path: Path) -> None:
    (tmp_path / "duplicates.py").write_text(DUPLICATES)
    rehearsed = rehearse("duplicates", gpus=1, folder=tmp_path)
    text = "Duplicate GPU detected : rank {} and rank {} both on CUDA device 1000"
    said = [text.format(*ranks) in rehearsed.output for ranks in ((0, 1), (1, 0))]
    assert any(said), rehearsed.output
    assert "DistBackendError: NCCL error in" in rehearsed.output
    assert "connected" not in rehearsed.output
