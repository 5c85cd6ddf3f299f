"""The doctor on machines with pretended GPUs: it asks all of them, and says what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import rehearse

SABOTAGE = '''
"""Runs the doctor where sums, copies to cuda:1, and steps of nn.DataParallel are wrong."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence.commands.doctor import examination
from ddp_equivalence.commands.main import main

right_sum, right_step = examination.all_reduce, examination.data_parallel_step


def wrong_sum(rank, argument):
    right = dist.all_reduce

    def all_reduce(values, *arguments):
        right(values, *arguments)
        if rank == 1:
            values[1000:1003] += 1

    dist.all_reduce = all_reduce
    try:
        yield from right_sum(rank, argument)
    finally:
        dist.all_reduce = right


def wrong_step(rank, argument):
    right_to = torch.Tensor.to

    def to(values, target, *arguments):
        copy = right_to(values, target, *arguments)
        return copy + 1 if str(target) == "cuda:1" else copy

    torch.Tensor.to = to
    nn.DataParallel = lambda module, device_ids: lambda rows: 2 * module(rows)
    yield from right_step(rank, argument)


if __name__ == "__main__":
    examination.all_reduce, examination.data_parallel_step = wrong_sum, wrong_step
    raise SystemExit(main(["doctor"]))
'''


@pytest.mark.thorough
def test_the_doctor_asks_every_gpu_and_every_pair() -> None:
    doctor = rehearse("ddp_equivalence", "doctor", gpus=4)
    assert doctor.returncode == 0, doctor.output
    lines = {name: line for name, line in outcomes(doctor.output).items() if line[0] == "works"}
    pairs = ["0-1", "0-2", "0-3", "1-2", "1-3", "2-3"]
    gpus = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    lanes = ["nccl", "gloo_cuda", "data_parallel", "gloo_fallback"]
    assert list(lines) == [*gpus, *pairs, "all 4", *lanes]
    assert re.fullmatch(r"the sum is right, \d+\.\d\d GB/s; P2P over NVLink", lines["0-3"][1])
    assert "4 ranks started" in lines["nccl"][1]
    assert "one step over 4 GPUs is that of the big batch" in lines["data_parallel"][1]
    assert "Problems" not in doctor.output
    # Ranks are stopped before others get their GPU, and the doctor itself never uses one.
    assert doctor.most_contexts() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert not doctor.initialised_by_no_rank()


@pytest.mark.thorough
def test_the_doctor_asks_the_lanes_that_share_the_only_gpu() -> None:
    doctor = rehearse("ddp_equivalence", "doctor", gpus=1)
    assert doctor.returncode == 0, doctor.output
    lines = outcomes(doctor.output)
    assert lines["nccl"][1].endswith("1 rank started in " + lines["nccl"][1].rpartition(" in ")[2])
    assert re.fullmatch(r"\d\d answers right, 2 ranks started in .*", lines["nccl_shared"][1])
    assert lines["data_parallel"] == ("NOT RUN", "needs 2 CUDA devices, found 1")
    with_two = "the gradient of one step with 2 replicas on one GPU is that of the big batch"
    assert lines["data_parallel_shared"] == ("works", with_two)
    assert not {"pairs", "nodes"} & set(lines)
    assert doctor.most_contexts() == {0: 2}


def test_a_gpu_that_is_lost_does_not_hide_the_others() -> None:
    doctor = rehearse("ddp_equivalence", "doctor", gpus=3, lost=1, exclusive=True)
    assert doctor.returncode == 3, doctor.output
    lines = outcomes(doctor.output)
    assert [lines[f"cuda:{number}"][0] for number in range(3)] == ["works", "FAILED", "works"]
    assert lines["0-2"][0] == "works"
    assert not {"0-1", "1-2", "all 2"} & set(lines)
    text = " ".join(doctor.output.split())
    assert "GPUs 0, 2: the compute mode is EXCLUSIVE_PROCESS" in text
    assert "NVML says of GPU 1: GPU is lost" in text
    assert "cuda:1: not even one product was right there" in text
    assert "export CUDA_VISIBLE_DEVICES=0,2" in text


@pytest.mark.thorough
def test_wrong_answers_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    visible = {"CUDA_VISIBLE_DEVICES": "3,1"}
    doctor = rehearse("sabotage", gpus=4, folder=tmp_path, environment=visible)
    assert doctor.returncode == 1, doctor.output
    lines = outcomes(doctor.output)
    wrong = "3 of 4194304 elements of the sum are wrong on rank 1"
    assert lines["0-1"] == ("WRONG", f"{wrong}; with NCCL_P2P_DISABLE=1: {wrong}")
    assert lines["data_parallel"] == (
        "WRONG",
        "a copy from cuda:0 to cuda:1 arrived changed; replicas ran on cpu and not on cuda:0, "
        "cuda:1; the gradient differs from the big batch's by 3 of its size",
    )
    assert lines["nccl"][0] == "works"
    assert {context.gpu for context in doctor.contexts} == {1, 3}


def outcomes(output: str) -> dict[str, tuple[str, str]]:
    """The name of each part -> its outcome and its text, in the order of the output."""
    pattern = re.compile(r"  (\S+(?: \d)?) +(works|WRONG|FAILED|NOT RUN) +(.*)")
    found = [match.groups() for line in output.splitlines() if (match := pattern.fullmatch(line))]
    return {name: (outcome, text) for name, outcome, text in found}
