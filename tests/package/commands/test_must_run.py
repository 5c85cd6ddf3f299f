"""``run --must-run gpu`` stands for the lanes on GPUs that this machine can run."""

from __future__ import annotations

import pytest

from ddp_equivalence.commands.run import _must_run
from ddp_equivalence.ranks import lanes

ONE_RANK_EACH = ("nccl", "data_parallel", "gloo_cuda")
SHARED = ("nccl_shared", "data_parallel_shared")


@pytest.mark.parametrize(
    ("gpus", "demanded"),
    [
        (0, {"nccl"}),  # it fails, and says that there is no GPU
        (1, {"nccl", "gloo_cuda", *SHARED}),
        (2, {*ONE_RANK_EACH, *SHARED}),
        (4, {*ONE_RANK_EACH, *SHARED}),
        (8, {*ONE_RANK_EACH}),
    ],
)
def test_gpu_demands_what_this_machine_can_run(
    gpus: int, demanded: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "cuda_devices", lambda: tuple(map(str, range(gpus))))
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: True)
    assert set(_must_run(["gpu"])) == demanded
    assert list(_must_run(["emulated"])) == ["emulated"]


def test_ranks_that_cannot_share_are_not_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "cuda_devices", lambda: ("0",))
    monkeypatch.setattr(lanes, "why_not_shared", lambda ranks, devices: "EXCLUSIVE_PROCESS")
    assert set(_must_run(["gpu"])) == {"nccl", "data_parallel_shared", "gloo_cuda"}
