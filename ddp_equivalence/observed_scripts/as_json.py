"""What ``observe`` found, as JSON for other programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddp_equivalence.report.short.lines_of_code import pointed_lines

if TYPE_CHECKING:
    from ddp_equivalence.observed_scripts.observed import Observed
    from ddp_equivalence.report.verdict import Verdict

SCHEMA = 1
"""The version of this format. It grows by one when a field changes its meaning or goes."""


def write_json(observed: Observed, path: Path) -> None:
    """Write everything that a program may want to know of an observed script."""
    path.write_text(f"{json.dumps(as_json(observed), indent=1, allow_nan=False)}\n")


def as_json(observed: Observed) -> dict[str, Any]:
    """The same as values. Numbers that are not finite are null."""
    recorded, replayed = observed.seconds
    return {
        "schema": SCHEMA,
        "script": observed.name,
        "outcome": observed.outcome,
        "cause": observed.verdict.cause,
        "reason": observed.verdict.reason,
        "command": list(observed.command),
        "one_process": list(observed.one_process),
        "world_size": observed.world_size,
        "float64": observed.float64,
        "cuda_on_cpu": observed.on_cpu,
        "seconds_on_ranks": recorded,
        "seconds_in_one_process": replayed,
        "torch": torch.__version__,
        "notes": list(observed.notes),
        "warnings": list(observed.warnings),
        "ending": None if (end := observed.ending) is None else end.outcome,
        "steps": [_step(observed, number) for number in range(len(observed.verdicts))],
    }


def _step(observed: Observed, number: int) -> dict[str, Any]:
    verdict, facts = observed.verdicts[number], observed.facts[number]
    because = verdict.unknown_because
    return {
        "number": number + 1,
        "outcome": verdict.outcome,
        "cause": verdict.cause,
        "reason": verdict.reason,
        "unknown_because": None if because is None else because.value,
        "optimizers": list(facts.optimizers),
        "rows": facts.rows,
        "micro_batches": facts.micro_batches,
        "loss": _finite(facts.loss),
        "clips": facts.clips,
        "error": _finite(verdict.error),
        "floor": _finite(verdict.floor),
        "limit": _finite(verdict.limit),
        "lines": _lines(verdict),
    }


def _lines(verdict: Verdict) -> list[dict[str, Any]]:
    if verdict.outcome != "different":
        return []
    return [
        {
            "file": one.line.file,
            "line": one.line.number,
            "note": one.note,
            "is_fault": one.is_fault,
        }
        for one in pointed_lines(verdict)
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
