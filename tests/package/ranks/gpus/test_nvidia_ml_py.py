"""The real nvidia-ml-py, which calls a stub of the driver's library instead of NVML.

It shows that the package calls the functions of nvidia-ml-py as they are, and reads what they
return. What a driver answers, only a driver can show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_equivalence.ranks.gpus import Gpu, GpuProcess, Gpus, Link

STUB = Path(__file__).with_name("stub_nvml.c")

PRINT = "from ddp_equivalence.ranks.gpus import gpus; print(gpus())"


@pytest.mark.skipif(find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc to make the stub with")
def test_what_nvidia_ml_py_makes_of_a_library(tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, STUB], check=True)
    printed = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRINT],
        env=os.environ
        | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    expected = Gpus(
        gpus=tuple(
            Gpu(
                index=index,
                name="Stub of a GPU",
                uuid=f"GPU-{index}",
                pci_bus_id=f"00000000:1{index}:00.0",
                compute_capability=(9, 0),
                memory_total=80,
                memory_free=40,
                compute_mode="exclusive_process",
                processes=(GpuProcess(42, 40),),
            )
            for index in (0, 1)
        ),
        driver="580.65.06",
        cuda_of_driver="13.0",
        links=(Link(0, 1, p2p="ok", nvlink=False, path="SYS"),),
    )
    assert printed == str(expected)
