"""What is said of the machine, and of the variables that are set."""

from __future__ import annotations

import pytest

from ddp_equivalence.ranks.gpus import Gpu, GpuProcess, Gpus
from ddp_equivalence.report.machine import (
    GIB,
    HIDDEN,
    PREFIXES,
    Box,
    box_lines,
    set_variables,
    title,
)

GPUS = Gpus(
    gpus=(
        Gpu(
            *(0, "NVIDIA A100", "GPU-00000000-1111", "0000:01:00.0", (8, 0), 80 * GIB, 79 * GIB),
            *("default", False, (), (GpuProcess(12, None),)),
        ),
        Gpu(1, "NVIDIA A100", "GPU-11111111-2222", compute_mode="exclusive_process", mig=True),
        Gpu(2, problem="Unknown Error"),
    ),
    driver="580.65.06",
    cuda_of_driver="13.0",
)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set_variables():
        monkeypatch.delenv(name)


def test_every_gpu_is_described_as_far_as_nvml_knows_it() -> None:
    lines = list(box_lines(Box(GPUS, 3)))
    assert lines[0].startswith("Machine: 2 x NVIDIA A100, 1 x unknown GPU, ")
    start = lines.index("  driver 580.65.06, which runs CUDA up to 13.0") + 1
    assert lines[start : start + 4] == [
        "  GPU 0: NVIDIA A100, compute capability 8.0, 79.0 of 80.0 GiB free, compute mode "
        "default, MIG off, 1 process on it, GPU-00000000-1111",
        "  GPU 1: NVIDIA A100, compute mode exclusive_process, MIG on, GPU-11111111-2222",
        "  GPU 2: name unknown, Unknown Error",
        "  The ranks may use all 3 CUDA devices",
    ]


def test_no_uuid_is_told_where_none_is_wanted() -> None:
    assert "GPU-0" not in "\n".join(box_lines(Box(GPUS, 3), with_uuids=False))


def test_the_gpus_that_are_left_to_the_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    text = "\n".join(box_lines(Box(GPUS, 2)))
    wanted = "may use 2 CUDA devices, as CUDA_VISIBLE_DEVICES says: GPU 1, GPU 0"
    assert wanted in text
    assert "float32 is multiplied with NVIDIA_TF32_OVERRIDE=1" in text
    assert "Set: CUDA_VISIBLE_DEVICES=1,0, NVIDIA_TF32_OVERRIDE=1" in text


def test_only_the_begin_of_a_long_value_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some images list every driver that they run with."""
    monkeypatch.setenv("NVIDIA_REQUIRE_CUDA", "cuda>=13.0 " + "brand=tesla,driver>=550 " * 40)
    (line,) = [one for one in box_lines(Box(GPUS, 2)) if one.startswith("  Set: ")]
    assert "NVIDIA_REQUIRE_CUDA=cuda>=13.0 brand=tesla" in line
    assert len(line) < 120


def test_gpus_that_torch_cannot_use_are_no_secret() -> None:
    text = "\n".join(box_lines(Box(GPUS, 0)))
    assert "The ranks may use none of them: torch finds no CUDA device" in text
    assert "float32 is multiplied" not in text


def test_a_machine_without_gpus_is_described_in_few_lines() -> None:
    box = Box(Gpus(problem="nvidia-ml-py is not installed"), 0)
    assert title(box).startswith("no GPU, ")
    lines = list(box_lines(box))
    assert len(lines) == 4
    assert lines[-1] == "  Set: no variable of NCCL, CUDA, NVIDIA or torch"


def test_devices_that_nvml_does_not_name_are_counted_with_the_reason() -> None:
    box = Box(Gpus(problem="nvidia-ml-py is not installed"), 2)
    assert title(box).startswith("2 CUDA devices, ")
    assert "  nvidia-ml-py is not installed" in list(box_lines(box))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_TOPO_FILE", "/srv/site/topology.xml"),
        ("NCCL_HOSTID", "node7"),
        ("NCCL_COMM_ID", "10.1.2.3:4000"),
        ("NCCL_DEBUG_FILE", "log.%h.%p"),
        ("TORCH_HUB_TOKEN", "abc"),
        ("NVIDIA_PROXY", "10.1.2.3"),
        ("CUDA_SERVER", "gpu.example.org"),
        ("NVIDIA_VISIBLE_DEVICES", "somebody@box"),
    ],
)
def test_a_private_value_is_not_shown(name: str, value: str) -> None:
    assert set_variables({name: value}) == {name: HIDDEN}


def test_settings_are_shown_and_other_variables_are_left_out() -> None:
    settings = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "^lo,docker",
        "CUDA_VERSION": "13.0.1",
        "NVIDIA_REQUIRE_CUDA": "cuda>=13.0 brand=tesla",
        "TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX",
    }
    others = {"HOME": "x", "PATH": "y", "PYTEST_TORCH_": "z"}
    assert set_variables(settings | others) == settings
    assert all(name.startswith(PREFIXES) for name in set_variables())
