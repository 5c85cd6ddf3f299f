"""The table of all misbehaviours, with the seconds until each verdict was there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.package.ranks.misbehaviour import MISBEHAVIOURS, MOMENTS

PROPERTY = "misbehaviour"
"""The user property of a test report that holds (misbehaviour, moment, rank, seconds)."""


def table_lines(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """One row per misbehaviour and one column per moment; nothing if no such test has run.

    A cell holds the seconds of the slowest rank, or says that a test has failed.
    """
    seconds: dict[str, dict[str, list[float]]] = {}
    failed: set[tuple[str, str]] = set()
    count = 0
    for report in reports:
        for key, value in report.user_properties:
            if key == PROPERTY and report.when == "call":
                assert isinstance(value, tuple | list)
                name, moment, _, took = value
                seconds.setdefault(name, {}).setdefault(moment, []).append(took)
                count += 1
                if report.failed:
                    failed.add((name, moment))
    if not seconds:
        return
    width = max(map(len, seconds)) + 2
    yield " " * width + "".join(f"{moment:>14}" for moment in MOMENTS)
    for name in sorted(seconds, key=list(MISBEHAVIOURS).index):  # tests run in any order
        by_moment = seconds[name]
        cells = [_cell(by_moment.get(moment), (name, moment) in failed) for moment in MOMENTS]
        yield f"{name:<{width}}" + "".join(f"{cell:>14}" for cell in cells)
    right = "all red with the right cause and rank, each next case right, nothing left running"
    wrong = f"{len(failed)} cells are NOT as they should be"
    yield f"{count} misbehaviours on 3 ranks, {wrong if failed else right}"


def _cell(seconds: list[float] | None, failed: bool) -> str:
    if seconds is None:
        return "–"
    return "FAILED" if failed else f"{max(seconds):.1f} s"
