"""The table of what ranks did wrong, and how long it took until the verdict was there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.package.ranks.misbehaviour import FAULTS, MOMENTS

FAULT = "fault"
"""The property of a report that holds (fault, moment, rank, seconds)."""


def lines(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """One row a fault; each cell the slowest of its ranks, in seconds, or what went wrong."""
    seconds: dict[str, dict[str, list[float]]] = {}
    failed: set[tuple[str, str]] = set()
    count = 0
    for report in reports:
        for key, found in report.user_properties:
            if key == FAULT and report.when == "call":
                assert isinstance(found, tuple | list)
                fault, moment, _, took = found
                seconds.setdefault(fault, {}).setdefault(moment, []).append(took)
                count += 1
                if report.failed:
                    failed.add((fault, moment))
    if not seconds:
        return
    width = max(map(len, seconds)) + 2
    yield " " * width + "".join(f"{moment:>14}" for moment in MOMENTS)
    for fault in sorted(seconds, key=list(FAULTS).index):  # whatever order the tests ran in
        by_moment = seconds[fault]
        cells = [_cell(by_moment.get(moment), (fault, moment) in failed) for moment in MOMENTS]
        yield f"{fault:<{width}}" + "".join(f"{cell:>14}" for cell in cells)
    right = "all red with the right cause and rank, each next case right, nothing left running"
    wrong = f"{len(failed)} cells are NOT as they should be"
    yield f"{count} misbehaviours on 3 ranks, {wrong if failed else right}"


def _cell(seconds: list[float] | None, failed: bool) -> str:
    if seconds is None:
        return "–"
    return "FAILED" if failed else f"{max(seconds):.1f} s"
