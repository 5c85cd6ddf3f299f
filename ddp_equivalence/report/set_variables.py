"""The variables of NCCL, CUDA and torch that are set, without values that are private."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

PREFIXES = ("NCCL_", "CUDA_", "NVIDIA_", "TORCH_", "HIP_", "HSA_", "ROCR_", "RCCL_")

NAMES_OF_HIDDEN = re.compile(r"TOKEN|SECRET|KEY|PASSWORD|USER|HOST|ADDR|COMM_ID|FILE|PATH")
"""The values of such variables name a machine, a person or a folder, or open a door."""

HIDDEN_VALUES = re.compile(r"[/\\@~]|\b\d+\.\d+\.\d+\.\d+\b|[A-Za-z][\w-]*\.[A-Za-z]")
"""Paths, addresses of machines, and names of machines."""

HIDDEN = "(set, not shown)"


def set_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name -> value of the variables that are set; ``HIDDEN`` stands for a value that is private.

    ``environment``: None stands for that of this process.
    """
    variables = os.environ if environment is None else environment
    return {
        name: HIDDEN if _is_private(name, value) else value
        for name, value in sorted(variables.items())
        if name.startswith(PREFIXES)
    }


def _is_private(name: str, value: str) -> bool:
    return bool(NAMES_OF_HIDDEN.search(name) or HIDDEN_VALUES.search(value))
