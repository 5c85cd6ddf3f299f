"""What a page shows of a check that did not come out as its test expects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

MOST_PARAMETERS = 400
MOST_SHARES = 4_096
LONGEST_REPORT = 8_000


def details_of(verdict: Verdict) -> dict[str, Any]:
    """``report``: the short one. ``shares``: how often each example, or each rank's examples,
    entered what every rank holds, with the name of what could be told apart. ``parameters``: name,
    error, rounding floor and limit of each, in the order in which backward reaches them.
    """
    return {
        "report": _report(verdict)[:LONGEST_REPORT],
        "shares": _shares(verdict),
        "parameters": _parameters(verdict),
    }


def _report(verdict: Verdict) -> str:
    if verdict.of_script and verdict.outcome == "different" and not verdict.findings:
        return "Only the first step of a script that differs is explained."
    return str(verdict)


def _shares(verdict: Verdict) -> Mapping[str, Any] | None:
    shares = verdict.shares
    if shares is None:
        return None
    rows, pieces = shares.by_rank, "ranks"
    if shares.by_example is not None:
        count = sum(map(len, shares.by_example.values()))
        if count <= MOST_SHARES:
            rows, pieces = shares.by_example, "examples"
    return {
        "pieces": pieces,
        "ranks": list(rows),
        "rows": [[_finite(share) for share in row] for row in rows.values()],
    }


def _parameters(verdict: Verdict) -> list[list[Any]]:
    if verdict.comparison is None:
        return []
    return [
        [one.name, _finite(one.error), _finite(one.limit.floor), _finite(one.limit.relative)]
        for one in reversed(verdict.comparison.parameters[-MOST_PARAMETERS:])
    ]


def _finite(value: float | None) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
