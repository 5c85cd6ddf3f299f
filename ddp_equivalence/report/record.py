"""What a run remembers of each check: plain data, for the closing table and for machines."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

Record = dict[str, Any]
"""id, strategy, layout, backend, dtype, expected, outcome, cause, error, floor, limit, seconds;
causes: all that cannot be told apart from it; planted: the fault that was planted on purpose; and
parameters, elements, ranks: how much was compared."""


def record_of(verdict: Verdict, test_id: str, expected: str, floor: bool = True) -> Record:
    """The record of one verdict. Errors that are not finite become None, since JSON has none.

    ``floor``: with the rounding floor, which may have to be measured first.
    """
    comparison = verdict.comparison
    return {
        "id": test_id,
        "strategy": verdict.subject,
        "layout": verdict.case.layout,
        "backend": verdict.lane.name,
        "dtype": verdict.case.dtype_name,
        "expected": expected,
        "outcome": verdict.outcome,
        "cause": verdict.cause,
        "causes": [name for one in verdict.findings if one.accepted for name in one.causes],
        "error": _finite(verdict.error),
        "floor": _finite(verdict.floor) if floor else None,
        "limit": _finite(verdict.limit),
        "seconds": round(verdict.seconds, 4),
        "reason": verdict.reason,
        "unknown_because": verdict.unknown_because and verdict.unknown_because.value,
        "lane_reason": verdict.lane.reason,
        "parameters": len(comparison.parameters) if comparison else 0,
        "elements": comparison.elements if comparison else 0,
        "ranks": len(comparison.ranks) if comparison else 0,
    }


def environment() -> Mapping[str, Any]:
    """What the results depend on beside the suite itself."""
    import torch

    from ddp_equivalence.ranks.lanes import cuda_devices

    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "ddp_equivalence": version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "cuda_devices": len(cuda_devices()),
    }


def version() -> str:
    """The installed version; "checkout" where the package was never installed."""
    from importlib import metadata

    try:
        return metadata.version("ddp_equivalence")
    except metadata.PackageNotFoundError:
        return "checkout"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
