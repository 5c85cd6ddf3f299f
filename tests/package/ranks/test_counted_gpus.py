"""GPUs are counted by NVML where it can, and else by CUDA; what keeps both from it is a reason."""

from __future__ import annotations

import warnings
from typing import NoReturn

import pytest
import torch

from ddp_equivalence.ranks import lanes
from ddp_equivalence.ranks.lanes import count_gpus, variables

UUIDS = [f"GPU-{letter}0000000-0000-0000-0000-000000000000" for letter in "abcd"]


def never() -> NoReturn:
    raise AssertionError("CUDA was initialised in the judging process")


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """This torch seems to be built for CUDA, on a machine with four GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", never, raising=False)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: len(UUIDS))
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def nvml_does_not_initialise() -> int:
    """As torch's own function after the driver was updated."""
    warnings.warn("Can't initialize NVML", stacklevel=1)
    return -1


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("2, 0", ("2", "0")),
        ("1,7,2", ("1",)),
        ("1,1", ()),
        ("-1", ()),
        ("GPU-c,GPU-a", ("GPU-c", "GPU-a")),
    ],
)
def test_the_gpus_have_the_names_that_cuda_visible_devices_gives_them(
    visible: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (count_gpus().names, count_gpus().problem) == (names, "")


def test_a_torch_for_the_cpu_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", never)
    assert count_gpus().names == ()


def driver_error() -> int:
    """As torch where CUDA cannot initialise either."""
    warnings.warn("CUDA initialization: driver mismatch", stacklevel=1)
    return 0


def test_nvml_that_cannot_initialise_is_the_reason_of_every_lane_that_needs_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pytest turns warnings into errors here, so a warning that got out would fail the test."""
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", nvml_does_not_initialise)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", driver_error, raising=False)
    lanes._counted.cache_clear()
    try:
        reasons = [lanes.missing(name, 2) for name in ("nccl", "data_parallel", "gloo_cuda")]
    finally:
        lanes._counted.cache_clear()
    why = "(Can't initialize NVML; CUDA initialization: driver mismatch)"
    assert reasons == [
        f"needs 2 CUDA devices (one rank each), found 0 {why}",
        f"needs 2 CUDA devices, found 0 {why}",
        f"needs 1 CUDA device, found 0 {why}",
    ]


def test_where_nvml_cannot_tell_cuda_counts_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process only one instance, whatever CUDA_VISIBLE_DEVICES lists."""
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert count_gpus().names == ("MIG-a",)


def test_ranks_see_their_gpus_through_the_variable_of_their_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert variables("1,2") == {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert variables("") == {"CUDA_VISIBLE_DEVICES": ""}
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert set(variables("1,2").items()) == {
        ("HIP_VISIBLE_DEVICES", "1,2"),
        ("CUDA_VISIBLE_DEVICES", "1,2"),
    }
    # HIP takes an empty variable for one that is not set, and shows all GPUs.
    assert set(variables("").values()) == {"-1"}


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, ("0", "1", "2", "3")),
        ({"CUDA_VISIBLE_DEVICES": "3,2"}, ("3", "2")),
        ({"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "0"}, ("3", "1")),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ("0", "1")),
        ({"ROCR_VISIBLE_DEVICES": "1,2,3", "HIP_VISIBLE_DEVICES": "2,0"}, ("2", "0")),
    ],
)
def test_on_rocm_the_variables_of_rocm_go_first(
    environment: dict[str, str], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "_raw_device_count_amdsmi", lambda: 4)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert count_gpus().names == names


def test_variables_of_rocm_that_contradict_each_other_are_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1")
    counted = count_gpus()
    assert counted.names == ()
    assert "more devices than ROCR_VISIBLE_DEVICES" in counted.problem
