"""Every problem that the doctor knows: the machine that has it, and the words that it must say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.commands.doctor.command import problem_lines
from ddp_equivalence.commands.doctor.examination import Machine, Outcome, State
from ddp_equivalence.commands.doctor.problems import Problem, problems
from ddp_equivalence.ranks.gpus import GpuProcess, NvmlState
from tests.package.commands.doctor.boxes import GIB, box, found, gpu

ROOT = Path(__file__).parents[4]

NO_PERMISSION, NO_DRIVER, NO_LIBRARY, MISMATCH, NO_PACKAGE = (
    {"nvml": state, "problem": str(state)}
    for state in (
        NvmlState.NO_PERMISSION,
        NvmlState.NO_DRIVER,
        NvmlState.NO_LIBRARY,
        NvmlState.VERSION_MISMATCH,
        NvmlState.NO_PACKAGE,
    )
)
CPU_BUILD: dict[str, Any] = {"torch_cuda": None, "torch_version": "2.13.0+cpu", "devices": ()}
ROCM: dict[str, Any] = {"torch_cuda": None, "torch_hip": "6.4", "nvml": NvmlState.ROCM}

MACHINES_WITH_A_PROBLEM = {
    "a CPU build of torch and a GPU": (
        box(gpu(0), **CPU_BUILD),
        "is built for the CPU",
        "pytorch.org",
    ),
    "a CPU build of torch and a device file": (
        box(device_files=("nvidia0",), **CPU_BUILD, **NO_PACKAGE),
        "this machine has GPUs",
        "install a build of torch",
    ),
    "a CUDA build and no driver": (box(**NO_LIBRARY), "is built for CUDA", "--gpus all"),
    "the driver is not loaded": (box(**NO_DRIVER), "not loaded", "modprobe nvidia"),
    "another version of the driver's library": (
        box(**MISMATCH),
        "different versions",
        "restart the machine",
    ),
    "device files that are not readable": (box(**NO_PERMISSION), "not readable", "administrator"),
    "NVML was not asked": (
        box(devices=("0",), **NO_PACKAGE),
        "nvidia-ml-py",
        "were not looked at",
    ),
    "a driver that is too old": (
        box(gpu(0), driver="535.1", cuda_of_driver="12.2"),
        "driver 535.1 runs CUDA up to 12.2, and torch 2.13.0 is built for CUDA 13.0",
        "driver 580 or newer",
    ),
    "a driver of an older minor version": (
        box(gpu(0), cuda_of_driver="12.4", torch_cuda="12.8"),
        "works, except",
        "PTX",
    ),
    "64 MB of shared memory": (
        box(gpu(0), gpu(1), shared_memory=64 * 2**20),
        "/dev/shm has 64 MiB",
        "--ipc=host",
    ),
    "exclusive": (
        box(*(gpu(index, compute_mode="exclusive_process") for index in (0, 1)), gpu(2)),
        "GPUs 0, 1: the compute mode is EXCLUSIVE_PROCESS",
        "`sudo nvidia-smi -i 0,1 -c DEFAULT`",
    ),
    "prohibited": (
        box(gpu(0, compute_mode="prohibited")),
        "GPU 0: the compute mode is PROHIBITED",
        "`sudo nvidia-smi -i 0 -c DEFAULT`",
    ),
    "instances": (
        box(gpu(0, mig=True, mig_uuids=("MIG-a", "MIG-b"))),
        "GPU 0: divided into instances",
        "CUDA_VISIBLE_DEVICES",
    ),
    "no instances": (box(gpu(0, mig=True)), "without instances", "nvidia-smi mig -i 0 -cgi"),
    "a GPU with another process's 70 GB": (
        box(gpu(0, memory_free=10 * GIB, processes=(GpuProcess(17, 70 * GIB),))),
        "70.0 of the 80.0 GiB of GPU 0 are in use, by process 17 (70.0 GiB)",
        "may run out of memory",
    ),
    "memory of processes that a container hides": (
        box(gpu(0, memory_free=10 * GIB, processes=None)),
        "does not see",
        "leave the GPU out",
    ),
    "a small GPU that is nearly full": (
        box(gpu(0, memory_total=6 * GIB, memory_free=3 * GIB)),
        "3.0 of the 6.0 GiB",
        "wait",
    ),
    "a GPU that is lost": (box(gpu(0, problem="GPU is lost")), "GPU is lost", "Xid"),
    "a list that ends early": (
        box(gpu(0), gpu(1), visible="0,7,1", devices=("0",)),
        "CUDA_VISIBLE_DEVICES=0,7,1 has 3 entries, but leaves 1 GPU",
        "nvidia-smi -L",
    ),
    "an empty list": (box(gpu(0), visible="", devices=()), "set and empty", "unset"),
    "ROCm without a GPU": (box(**ROCM), "/dev/kfd is missing", "--device=/dev/kfd"),
}


@pytest.mark.parametrize("name", MACHINES_WITH_A_PROBLEM)
def test_the_machine_has_this_problem_and_no_other(name: str) -> None:
    machine, what, advice = MACHINES_WITH_A_PROBLEM[name]
    (problem,) = problems(machine)
    assert what in problem.what
    assert advice in problem.advice


MACHINES_WITHOUT_PROBLEMS = {
    "four GPUs": box(gpu(0), gpu(1), gpu(2), gpu(3)),
    "no GPU and a CPU build": box(**CPU_BUILD, **NO_PACKAGE),
    "no GPU, a CPU build and a small /dev/shm": box(shared_memory=2**20, **CPU_BUILD, **NO_LIBRARY),
    "a newer driver": box(gpu(0), cuda_of_driver="14.1"),
    "one GPU and a small /dev/shm": box(gpu(0), shared_memory=2**20),
    "an unused GPU whose processes are hidden": box(gpu(0, processes=None)),
    "nothing known of the GPU": box(
        gpu(0, memory_free=None, compute_mode=None, mig=None, processes=None)
    ),
    "the problem's GPU is not visible": box(
        gpu(0, compute_mode="prohibited"), gpu(1), visible="1", devices=("1",)
    ),
    "ROCm with a GPU": box(device_files=("kfd",), devices=("0",), **ROCM),
    "a CUDA build, no GPU, and nobody to ask": box(**NO_PACKAGE),
}


@pytest.mark.parametrize("name", MACHINES_WITHOUT_PROBLEMS)
def test_the_machine_has_no_problem(name: str) -> None:
    machine: Machine = MACHINES_WITHOUT_PROBLEMS[name]
    assert list(problems(machine)) == []


def test_a_gpu_that_failed_alone_can_be_left_out() -> None:
    states = [found(0), found(1, Outcome.FAILED), found(2), found(3, Outcome.WRONG)]
    (problem,) = problems(box(*map(gpu, range(4))), states)
    assert problem.what.startswith("cuda:1, cuda:3: not even one product was right")
    assert "CUDA_VISIBLE_DEVICES=0,2" in problem.advice
    assert list(problems(box(gpu(0)), [found(0, Outcome.FAILED)])) == []  # no other is there


def test_pairs_that_work_only_without_p2p() -> None:
    pairs = [
        State("0-1", Outcome.WORKS, ""),
        State("0-2", Outcome.FAILED, "", without_p2p=Outcome.WORKS),
        State("1-2", Outcome.WRONG, "", without_p2p=Outcome.WORKS),
        State("1-3", Outcome.FAILED, "", without_p2p=Outcome.FAILED),
    ]
    (problem,) = problems(box(gpu(0)), pairs)
    assert "GPUs 0-2, 1-2 give" in problem.what
    assert "IOMMU or ACS" in problem.advice


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "EXCLUSIVE_PROCESS"),
        ("The NVIDIA driver on your system is too old (found version 11040)", "driver is too old"),
        ("CUDA error: no kernel image is available for execution", "no kernels"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB", "nvidia-smi"),
        ("CUDA error: system not yet initialized", "Fabric Manager"),
        ("NCCL WARN Error: failed to extend /dev/shm/nccl-03v824 to 4194660", "--ipc=host"),
        ("CUDA error: uncorrectable ECC error encountered", "hardware has failed"),
        ("Error 803: system has unsupported display driver / cuda driver combination", "restart"),
        ("Cannot re-initialize CUDA in forked subprocess. To use CUDA with", "METHOD=spawn"),
        ("Duplicate GPU detected : rank 0 and rank 1", "names twice"),
    ],
)
def test_an_error_of_cuda_or_nccl_has_its_remedy_once(error: str, words: str) -> None:
    states = [
        State("nccl", Outcome.FAILED, "", error),
        State("gloo_cuda", Outcome.FAILED, "", error),
    ]
    (problem,) = problems(box(gpu(0)), states)
    assert "nccl, gloo_cuda" in problem.what
    assert words in problem.advice


def test_an_error_that_nobody_knows_has_no_remedy() -> None:
    state = State("nccl", Outcome.FAILED, "", "ValueError: oh")
    assert list(problems(box(gpu(0)), [state])) == []


def test_the_document_has_every_problem_in_the_words_of_the_doctor() -> None:
    page = (ROOT / "docs/gpus.md").read_text(encoding="utf-8")
    table = page.partition("| doctor says |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))
    error = State("nccl", Outcome.FAILED, "", "CUDA out of memory")
    pair = State("0-1", Outcome.WRONG, "", without_p2p=Outcome.WORKS)
    states = [found(0), found(1, Outcome.WRONG)]
    said = [
        problem.what
        for machine, _, _ in MACHINES_WITH_A_PROBLEM.values()
        for problem in problems(machine, [*states, pair, error])
    ]
    assert [words for words in documented if not any(words in what for what in said)] == []
    assert [what for what in said if not any(words in what for words in documented)] == []


def test_problems_are_written_as_sentences() -> None:
    lines = list(problem_lines([Problem("the driver is too old", "`sudo reboot`")]))
    assert lines == [
        "",
        "Problems, and what to do",
        "  - The driver is too old.",
        "    `sudo reboot`.",
    ]
    assert list(problem_lines([])) == []
