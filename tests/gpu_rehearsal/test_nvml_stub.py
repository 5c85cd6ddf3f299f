"""How torch counts GPUs, asked for real: of a library that takes NVML's place.

With a torch that is built for CUDA, so is everything up to the driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("cc")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler to make the library")

DEVICES = """
import torch
from ddp_equivalence.ranks.lanes import cuda_devices
print(cuda_devices(), torch.cuda.is_initialized(), "libcuda.so" in open("/proc/self/maps").read())
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library."""
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-o", str(library), str(HERE / "nvml_stub.c")], check=True
    )
    return folder


def asked(program: str, stub: Path, **variables: str) -> str:
    """What the program prints on a machine with this library."""
    hidden = ("CUDA_", "PRETEND_")
    outer = {name: one for name, one in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=outer | {"LD_LIBRARY_PATH": str(stub), "PYTHONPATH": str(HERE.parents[1])} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


VISIBLE = """
import os, torch, warnings
warnings.simplefilter("ignore")
for text in ("0,2", "GPU-00000001", "GPU-0000", "2,0,9,1", "-1", "", "MIG-a,MIG-b"):
    os.environ["CUDA_VISIBLE_DEVICES"] = text
    print(torch.cuda._device_count_nvml(), end=" ")
os.environ |= {"CUDA_VISIBLE_DEVICES": "0", "STUB_NVML_ERROR": "18"}
print("and", torch.cuda._device_count_nvml())
"""


def test_torch_counts_the_gpus_that_nvml_lists(stub: Path) -> None:
    # "GPU-0000" is the beginning of several ids, and so of none. NVML cannot count MIG devices, nor
    # anything else if it and the driver have different versions.
    assert asked(VISIBLE, stub, STUB_GPUS="4") == "2 1 0 2 0 0 -1 and -1"


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch that is built for CUDA")
def test_a_torch_for_cuda_counts_the_gpus_without_cuda(stub: Path) -> None:
    assert asked(DEVICES, stub, STUB_GPUS="3") == "('0', '1', '2') False False"
    visible = asked(DEVICES, stub, STUB_GPUS="3", CUDA_VISIBLE_DEVICES="2,0")
    assert visible == "('2', '0') False False"
