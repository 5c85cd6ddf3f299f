"""What NVML says of the GPUs, with a stand-in for NVML."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from ddp_equivalence.ranks.gpus import Gpu, GpuProcess, Gpus, Link, NvmlState, gpus, visible_gpus
from tests.package.ranks.gpus.fake_nvml import FakeGpu, fake_nvml


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    def asked(module: ModuleType | None) -> Gpus:
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return gpus()

    return asked


def test_everything_that_nvml_says_of_two_gpus(ask: Any) -> None:
    module = fake_nvml(
        FakeGpu(0, processes=[(7, 2**20), (8, None)]),
        FakeGpu(1, compute_mode=3, free=5),
        p2p={0: 0, 2: 0},
    )
    box = ask(module)
    assert box.gpus[0] == Gpu(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-0abc0000-1111",
        pci_bus_id="00000000:10:00.0",
        compute_capability=(9, 0),
        memory_total=80 * 2**30,
        memory_free=79 * 2**30,
        compute_mode="default",
        mig=False,
        processes=(GpuProcess(7, 2**20), GpuProcess(8, None)),
    )
    assert (box.gpus[1].compute_mode, box.gpus[1].memory_free) == ("exclusive_process", 5)
    assert (box.driver, box.cuda_of_driver, box.problem) == ("580.65.06", "13.0", "")
    assert box.nvml is NvmlState.ANSWERED
    assert box.links == (Link(0, 1, p2p="ok", nvlink=True, path="NODE"),)
    assert box.link(1, 0) == box.links[0]
    assert module.open == 0, "NVML was not shut down"


def test_what_nvml_refuses_is_none(ask: Any) -> None:
    """Every question about a GPU may be refused, for example in a container or on MIG."""
    module = fake_nvml(FakeGpu(0), FakeGpu(1))
    questions = [name for name in vars(module) if name.startswith("nvmlDeviceGet")]
    questions = [name for name in questions if name not in ("nvmlDeviceGetCount", "open")]
    refusing = [FakeGpu(number, refuses=questions) for number in (0, 1)]
    box = ask(fake_nvml(*refusing))
    assert box.gpus == (Gpu(0), Gpu(1))
    assert box.links == (Link(0, 1, None, None, None),)
    assert box.problem == ""


def test_a_function_that_this_nvidia_ml_py_lacks_is_a_refusal(ask: Any) -> None:
    module = fake_nvml(FakeGpu(0))
    del module.nvmlDeviceGetCudaComputeCapability
    del module.nvmlSystemGetDriverVersion
    box = ask(module)
    assert (box.gpus[0].compute_capability, box.driver) == (None, None)
    assert box.gpus[0].name is not None


def test_a_gpu_that_is_lost_keeps_its_place(ask: Any) -> None:
    box = ask(fake_nvml(FakeGpu(0), FakeGpu(1, lost=True), FakeGpu(2)))
    assert [gpu.problem for gpu in box.gpus] == ["", "GPU is lost", ""]
    assert [(link.first, link.second) for link in box.links] == [(0, 2)]


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (4, NvmlState.NO_PERMISSION, "not readable"),
        (9, NvmlState.NO_DRIVER, "driver is not loaded"),
        (12, NvmlState.NO_LIBRARY, "libnvidia-ml.so.1"),
        (18, NvmlState.VERSION_MISMATCH, "different versions"),
        (999, NvmlState.FAILED, "error 999"),
    ],
)
def test_an_nvml_that_cannot_start_is_a_problem_in_words(
    ask: Any, error: int, state: NvmlState, words: str
) -> None:
    box = ask(fake_nvml(FakeGpu(0), init_error=error))
    assert (box.gpus, box.nvml) == ((), state)
    assert words in box.problem


def test_without_the_package_the_problem_says_how_to_install_it(ask: Any) -> None:
    box = ask(None)
    assert box.nvml is NvmlState.NO_PACKAGE
    assert "pip install nvidia-ml-py" in box.problem


def test_nvml_is_not_asked_about_rocm(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    box = ask(fake_nvml(FakeGpu(0)))
    assert (box.gpus, box.nvml) == ((), NvmlState.ROCM)


def test_an_older_driver(ask: Any) -> None:
    assert ask(fake_nvml(cuda=12080)).cuda_of_driver == "12.8"


def test_the_instances_of_a_divided_gpu(ask: Any) -> None:
    box = ask(fake_nvml(FakeGpu(0, mig=True, instances={0: "MIG-a", 3: "MIG-b"}), FakeGpu(1)))
    assert (box.gpus[0].mig, box.gpus[0].mig_uuids) == (True, ("MIG-a", "MIG-b"))
    assert (box.gpus[1].mig, box.gpus[1].mig_uuids) == (False, ())


GPUS = (
    Gpu(0, uuid="GPU-aa11", mig=True, mig_uuids=("MIG-x1", "MIG-x2")),
    Gpu(1, uuid="GPU-ab22"),
    Gpu(2, uuid="GPU-cc33"),
)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("0,-1,2", [0]),
        ("-1", []),
        ("0,7,2", [0]),
        ("1,1", []),
        ("0,no,2", [0]),
        ("GPU-cc33,GPU-aa11", [2, 0]),
        ("GPU-c", [2]),
        ("GPU-a", []),  # ambiguous
        ("GPU-cc33,GPU-cc", []),  # one GPU twice
        ("GPU-zz,GPU-cc33", []),
        ("MIG-x2,MIG-x1", [0, 0]),
        ("MIG-x1,MIG-x1", []),
    ],
)
def test_what_cuda_visible_devices_leaves(visible: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(GPUS, visible)] == indices


@pytest.mark.parametrize(
    "visible",
    ["2,0", " 1 , 2", "0,-1,2", "0,7,2", "1,1", "0,no,2", "GPU-cc33,GPU-aa11", "GPU-a", "GPU-zz"],
)
def test_torch_reads_cuda_visible_devices_in_the_same_way(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's reading is private: this test fails if it changes."""
    cuda: Any = torch.cuda
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", visible)
    read = cuda._parse_visible_devices()
    if read and isinstance(read[0], str):
        read = cuda._transform_uuid_to_ordinals(read, [gpu.uuid for gpu in GPUS])
    expected = [index for index in read if index < len(GPUS)] if 7 not in read else read[:1]
    assert [gpu.index for gpu in visible_gpus(GPUS, visible)] == expected
