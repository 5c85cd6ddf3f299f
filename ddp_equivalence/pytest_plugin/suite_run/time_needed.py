"""How long a run will take: an estimate from the mean times that tests took before.

Means and not medians, because the few tests that start ranks take much longer than all others, and
a run takes the sum of all.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.suite_run.plan import PlannedTest

CACHE_KEY = "ddp_equivalence/seconds_of_tests"

OTHER_TESTS = ("", 0)
"""The kind of the tests that are not in the catalogue."""

Kind = tuple[str, int]
"""Lane and number of ranks: tests of one kind take about equally long."""


@dataclass(frozen=True)
class Timings:
    """Mean seconds of one test of each kind, and where and when they were measured."""

    seconds: Mapping[Kind, float]
    where: str
    date: str


MEASURED = Timings(
    {("gloo_fallback", 2): 0.1, OTHER_TESTS: 0.1},
    "two CPU cores without a GPU",
    "2026-11-22",
)
"""Measured with torch 2.13.0+cpu and one pytest worker."""


def kind_of(test: PlannedTest) -> Kind:
    """The kind whose mean time is that of the test."""
    return test.lane, test.ranks


def seconds_of(test: PlannedTest, timings: Timings) -> float:
    """The time of one test, as the timings let expect it.

    A lane that was not timed counts like another lane with as many ranks.
    """
    if test.reason:
        return 0.0
    kind = kind_of(test)
    if kind in timings.seconds:
        return timings.seconds[kind]
    alike = [seconds for (_, ranks), seconds in timings.seconds.items() if ranks == kind[1]]
    return max(alike or timings.seconds.values())


def estimate_text(tests: Sequence[PlannedTest], timings: Timings, workers: int) -> str:
    """About how long the tests will take, and on what this rests."""
    seconds = sum(seconds_of(test, timings) for test in tests)
    shared = f", shared by {workers} workers" if workers > 1 else ""
    text = (
        f"Time: about {duration_text(seconds / workers)}. This is an estimate from mean times on "
        f"{timings.where} ({timings.date}){shared}."
    )
    lanes = {test.lane for test in tests if not test.reason and kind_of(test) not in timings.seconds}
    if lanes - {""}:
        text += (
            f" No test has been timed on {', '.join(sorted(lanes - {''}))}: such a test counts like "
            "one with as many ranks on another lane."
        )
    return text


def duration_text(seconds: float) -> str:
    """The time in words, such as ``40 s``, ``3 min`` or ``2 h 10 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@dataclass
class Stopwatch:
    """Adds up how long the tests of each kind took."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    _seconds: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    _tests: dict[Kind, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, report: pytest.TestReport) -> None:
        kind = self.kinds.get(report.nodeid)
        if kind is None or report.skipped:
            return
        self._seconds[kind] += report.duration
        self._tests[kind] += report.when == "call"

    def timings(self) -> Timings:
        """The mean time of each kind of which a test has run."""
        means = {kind: self._seconds[kind] / count for kind, count in self._tests.items() if count}
        return Timings(means, "this machine", time.strftime("%Y-%m-%d"))


def last_timings(config: pytest.Config) -> Timings:
    """Those of this machine's earlier runs; if there are none, those in ``MEASURED``."""
    cache = getattr(config, "cache", None)  # None under pytest -p no:cacheprovider
    kept: Any = cache.get(CACHE_KEY, None) if cache is not None else None
    try:
        seconds = {(lane, int(ranks)): float(mean) for lane, ranks, mean in kept["seconds"]}
        timings = Timings(seconds, "this machine", str(kept["date"]))
    except (TypeError, KeyError, ValueError):
        return MEASURED
    return timings if seconds else MEASURED


def keep_timings(config: pytest.Config, timings: Timings) -> None:
    """Keep these timings for the next run, and those of other kinds as they are."""
    cache = getattr(config, "cache", None)
    if cache is None or not timings.seconds:
        return
    before = last_timings(config)
    seconds = dict(before.seconds) if before is not MEASURED else {}
    seconds |= timings.seconds
    kept = [[lane, ranks, round(mean, 4)] for (lane, ranks), mean in sorted(seconds.items())]
    cache.set(CACHE_KEY, {"date": timings.date, "seconds": kept})
