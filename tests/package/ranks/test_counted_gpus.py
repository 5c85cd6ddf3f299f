"""GPUs are counted without CUDA, and what keeps NVML from counting them becomes a reason."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from ddp_equivalence.ranks import lanes
from ddp_equivalence.ranks.lanes import count_gpus, variables

UUIDS = [f"GPU-{letter}0000000-0000-0000-0000-000000000000" for letter in "abcd"]

DRIVER = """
#include <stdlib.h>
static int error(void) { const char *text = getenv("STUB_ERROR"); return text ? atoi(text) : 0; }
int cuInit(unsigned flags) { return error(); }
int cuDeviceGetCount(int *count) { *count = atoi(getenv("STUB_COUNT")); return error(); }
int cuGetErrorString(int code, const char **text) { *text = "driver mismatch"; return 0; }
"""


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


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that shows one device, or as many as STUB_COUNT says."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc, to compile a driver")
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("STUB_COUNT", "1")


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


def test_nvml_that_cannot_initialise_is_the_reason_of_every_lane_that_needs_gpus(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pytest turns warnings into errors here, so a warning that got out would fail the test."""
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", nvml_does_not_initialise)
    monkeypatch.setenv("STUB_ERROR", "803")
    lanes._counted.cache_clear()
    try:
        reasons = [lanes.missing(name, 2) for name in ("nccl", "data_parallel", "gloo_cuda")]
    finally:
        lanes._counted.cache_clear()
    why = "(Can't initialize NVML; CUDA error 803: driver mismatch)"
    assert reasons == [
        f"needs 2 CUDA devices (one rank each), found 0 {why}",
        f"needs 2 CUDA devices, found 0 {why}",
        f"needs 1 CUDA device, found 0 {why}",
    ]


def test_a_machine_without_a_driver_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", nvml_does_not_initialise)
    (tmp_path / "libcuda.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    counted = count_gpus()
    assert counted.names == ()
    assert "no driver was found: " in counted.problem


@pytest.mark.parametrize("shown", [1, 2])
def test_a_driver_that_works_without_nvml_counts_the_gpus(
    shown: int, driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", nvml_does_not_initialise)
    monkeypatch.setenv("STUB_COUNT", str(shown))
    assert count_gpus().names == ("0", "1")[:shown]


def test_instances_of_a_divided_gpu_are_counted_in_a_process_of_its_own(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA shows a process only one instance, whatever CUDA_VISIBLE_DEVICES lists."""
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
