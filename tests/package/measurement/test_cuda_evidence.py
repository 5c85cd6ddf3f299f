"""Ranks on CUDA name their physical GPUs, and say whether TF32 was allowed there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.diagnosis.vacuity import against_shared_gpus
from ddp_equivalence.measurement.returned import Tf32, gpus_used, tf32_of
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.machine import gpu_texts, tf32_texts

RANK = Rank(0, 1, 0, 1, 0, 1, torch.device("cuda", 1), "nccl")
ON_CPU = replace(RANK, device=torch.device("cpu"))
NCCL = Lane("nccl", "nccl", "cuda")
A, B = "GPU-aaaaaaaa-1111", "GPU-bbbbbbbb-2222"


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """``cuda:0`` and ``cuda:1``, whose UUIDs torch gives without NVML's prefix."""
    uuids = [one.removeprefix("GPU-") for one in (A, B)]
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=uuids[torch.device(device).index]),
    )


def evidence(gpu: str) -> Evidence:
    return Evidence((), {}, None, "", None, "cuda:0", {}, gpu=gpu)


def test_a_rank_names_the_gpu_that_holds_its_weights() -> None:
    with FakeTensorMode():
        own, moved = torch.zeros(2, device="cuda:1"), torch.zeros(2, device="cuda:0")
        assert gpus_used(RANK, [own, None]) == B
        assert gpus_used(RANK, [moved, own]) == f"{A}+{B}"


def test_an_instance_of_a_gpu_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", B.replace("GPU-", "MIG-"))
    assert gpus_used(RANK, []) == B.replace("GPU-", "MIG-")


def test_a_rank_whose_gradients_are_not_on_a_gpu_names_its_own() -> None:
    assert gpus_used(RANK, [torch.zeros(1)]) == B
    assert gpus_used(RANK, []) == B


def test_the_gpus_of_replicas_are_named() -> None:
    assert gpus_used(RANK, [], {"devices": ["cuda:0", "cuda:1"]}) == f"{A}+{B}"


def test_a_rank_on_the_cpu_has_no_gpu_and_no_tf32() -> None:
    assert gpus_used(ON_CPU, [torch.zeros(1)]) == ""
    assert tf32_of(ON_CPU) is None


@pytest.mark.parametrize("shared", ["1", "0+1"])
def test_ranks_that_share_a_gpu_on_nccl_show_nothing(shared: str) -> None:
    gpus = {"0": A, "1": B, "0+1": f"{A}+{B}"}
    found = {0: evidence(A), 1: evidence(B), 2: evidence(gpus[shared])}
    unknown = against_shared_gpus(NCCL, found)
    assert unknown is not None
    assert unknown.because is UnknownBecause.RANKS_SHARE_A_GPU
    assert ("ranks 1, 2" if shared == "1" else "ranks 0, 2") in unknown.reason
    assert "torch.cuda.set_device(0)" in unknown.reason


def test_ranks_with_gpus_of_their_own_are_judged_and_gloo_may_share() -> None:
    assert against_shared_gpus(NCCL, {0: evidence(A), 1: evidence(B)}) is None
    shared = {0: evidence(A), 1: evidence(A)}
    assert against_shared_gpus(Lane("gloo_cuda", "gloo", "cuda"), shared) is None
    on_purpose = Lane("nccl_shared", "nccl", "cuda", ranks_share_gpus=True)
    assert against_shared_gpus(on_purpose, shared) is None


@pytest.mark.parametrize(
    ("override", "matmul", "conv", "expected"),
    [
        ("0", "tf32", "tf32", Tf32(products=False, convolutions=False)),
        ("1", "tf32", "ieee", Tf32(products=True, convolutions=False)),
        (None, "none", "tf32", Tf32(products=False, convolutions=True)),
    ],
)
def test_tf32_is_what_torch_and_the_environment_allow(
    override: str | None, matmul: str, conv: str, expected: Tf32, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if override is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    names = ("backends.cuda.matmul.fp32_precision", "backends.cudnn.conv.fp32_precision")
    before = {name: process_state.SETTINGS[name].read() for name in names}
    process_state.apply(dict(zip(names, (matmul, conv), strict=True)))
    try:
        assert tf32_of(RANK) == expected
    finally:
        process_state.apply(before)


def test_the_report_names_gpus_and_precision_in_words() -> None:
    assert gpu_texts({0: A, 1: f"{A}+{B}", 2: A}) == [
        "ranks 0, 2 on GPU-aaaaaaaa",
        "rank 1 on GPU-aaaaaaaa and GPU-bbbbbbbb",
    ]
    assert gpu_texts({0: A, 1: ""}) == []
    assert tf32_texts([None]) == []
    off, mixed = Tf32(products=False, convolutions=False), Tf32(products=False, convolutions=True)
    assert tf32_texts([off]) == ["TF32 off for products and convolutions of float32"]
    assert tf32_texts([mixed]) == ["TF32 off for products and on for convolutions of float32"]
    assert "on for some ranks and off for others" in tf32_texts([off, mixed])[0]
