"""Counts the GPUs that this process may use, without initialising CUDA in it.

The ranks are forked from a server, and a fork of a process that has initialised CUDA cannot use it.
torch.cuda.device_count asks NVML, but where NVML gives no answer it asks CUDA itself, in this
process. That happens for MIG ids in CUDA_VISIBLE_DEVICES, and if NVML cannot initialise because the
driver was updated. So this module asks NVML, or AMD's library on ROCm, through the part of torch
that asks nothing else, and leaves all other questions to a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_equivalence.ranks import ask_driver

TIMEOUT = 60.0
"""Seconds that the driver may take to initialise every GPU of the machine."""

NO_GPU = ""
"""The value of CUDA_VISIBLE_DEVICES that hides all GPUs from CUDA."""

NO_GPU_OF_HIP = "-1"
"""The same for HIP, which takes an empty variable for one that is not set.

Source: ROCclr, ``Device::init`` in rocclr/device/rocm/rocdevice.cpp.
"""


@dataclass(frozen=True)
class CountedGpus:
    """``names``: the GPUs as CUDA_VISIBLE_DEVICES would name them. ``problem``: why NVML could not
    count them; "" if it did.
    """

    names: tuple[str, ...] = ()
    problem: str = ""


def count_gpus() -> CountedGpus:
    """Count the GPUs that this process may use."""
    if torch.version.cuda is None and torch.version.hip is None:
        return CountedGpus()
    count, problem = _count_without_cuda()
    if count < 0:
        count, of_driver = _ask_driver()
        problem = "; ".join(filter(None, (problem, of_driver)))
    visible = _chosen_by_user()
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return CountedGpus(tuple(name.strip() for name in names[:count]), problem)


def variables(visible: str) -> dict[str, str]:
    """The environment variables that let a new process see these GPUs and no others.

    On ROCm HIP_VISIBLE_DEVICES goes before CUDA_VISIBLE_DEVICES. ROCR_VISIBLE_DEVICES keeps the
    user's value: it chooses the GPUs that the numbers in HIP_VISIBLE_DEVICES count.
    """
    if torch.version.hip is None:
        return {"CUDA_VISIBLE_DEVICES": visible or NO_GPU}
    visible = visible or NO_GPU_OF_HIP
    return {"HIP_VISIBLE_DEVICES": visible, "CUDA_VISIBLE_DEVICES": visible}


def _chosen_by_user() -> str | None:
    """The variable in which the user has named GPUs, in the words that ``variables`` takes."""
    cuda = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.hip is None:
        return cuda
    hip = os.environ.get("HIP_VISIBLE_DEVICES")
    # Without HIP_VISIBLE_DEVICES, torch takes all GPUs that ROCR_VISIBLE_DEVICES leaves.
    return hip if hip is not None or "ROCR_VISIBLE_DEVICES" in os.environ else cuda


def _count_without_cuda() -> tuple[int, str]:
    """The number of GPUs, or -1 and the reason why it cannot be told without CUDA."""
    # Both functions are private: a test fails if torch changes them.
    count_without_cuda = (
        torch.cuda._device_count_amdsmi if torch.version.hip else torch.cuda._device_count_nvml
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = int(count_without_cuda())
        except RuntimeError as error:  # the user's variables contradict each other
            return 0, str(error)
    return count, "; ".join(dict.fromkeys(str(warning.message) for warning in caught))


def _ask_driver() -> tuple[int, str]:
    """The number of GPUs that a new process sees, and why there are none."""
    kind, library = "cuda", "libcuda.so.1"
    if torch.version.hip:
        bundled = Path(torch.__file__).parent / "lib" / "libamdhip64.so"
        kind, library = "hip", str(bundled) if bundled.exists() else "libamdhip64.so"
    command = [sys.executable, "-I", ask_driver.__file__, kind, library]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, check=True
        ).stdout
        count, _, reason = answer.strip().partition(" ")
        return int(count), reason
    except subprocess.TimeoutExpired:
        return 0, f"the driver did not answer within {TIMEOUT:g} s"
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        return 0, f"the driver could not be asked: {error}"
