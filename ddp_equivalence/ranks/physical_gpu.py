"""Says which GPU of the machine a CUDA device of this process is.

Every rank sees only the GPUs of its own simulated node, so ``cuda:0`` names another GPU on another
rank. A GPU has one UUID in every process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

SEVERAL = "+"
"""Stands between the UUIDs of the GPUs of one rank that has used several."""


def gpus_of(devices: Iterable[torch.device]) -> str:
    """The UUIDs of the CUDA devices among these, as ``nvidia-smi -L`` shows them.

    Several are in the order of their numbers, with ``SEVERAL`` between them; "" if there are none.
    """
    cuda = {device for device in devices if device.type == "cuda"}
    ordered = sorted(cuda, key=lambda device: device.index or 0)
    return SEVERAL.join(dict.fromkeys(map(_uuid, ordered)))


def _uuid(device: torch.device) -> str:
    # Torch leaves out the prefix that NVML and CUDA_VISIBLE_DEVICES use.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    # CUDA gives a process one instance of a GPU (MIG), and only if it is named here.
    is_instance = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    prefix = "MIG-" if is_instance else "GPU-"
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"{prefix}{uuid}"
