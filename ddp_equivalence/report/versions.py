"""Versions of the software, and the machine, that the results depend on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any


def versions() -> Mapping[str, Any]:
    """The entry ``environment`` of the JSON results; the doctor prints it too."""
    import torch

    from ddp_equivalence.ranks.lanes import cuda_devices

    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "ddp_equivalence": package_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "cuda_devices": len(cuda_devices()),
    }


def package_version() -> str:
    """The installed version; "checkout" where the package was never installed."""
    from importlib import metadata

    try:
        return metadata.version("ddp_equivalence")
    except metadata.PackageNotFoundError:
        return "checkout"
