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
import torch

from ddp_equivalence.pytest_plugin.suite_run.plan import PlannedTest
from ddp_equivalence.ranks.lanes import cuda_devices

CACHE_KEY = "ddp_equivalence/seconds_of_tests_on_{gpus}_gpus_under_torch_{torch}"

OTHER_TESTS = ("", 0)
"""The kind of the tests that are not in the catalogue."""

Kind = tuple[str, int]
"""Lane and number of ranks: tests of one kind take about equally long."""


@dataclass(frozen=True)
class Timings:
    """Mean seconds of one test of each kind, and where, when and how they were measured."""

    seconds: Mapping[Kind, float]
    where: str
    date: str
    workers: int = 1


MEASURED = Timings(
    {
        OTHER_TESTS: 0.077,
        ("emulated", 2): 0.111,
        ("emulated", 4): 0.030,
        ("gloo_fallback", 1): 0.025,
        ("gloo_fallback", 2): 0.052,
        ("gloo_fallback", 4): 0.089,
        ("gloo_fallback", 8): 0.223,
    },
    "two CPU cores without a GPU",
    "2026-11-22",
)
"""Measured with torch 2.13.0+cpu."""

LEAST_TESTS = 20
"""The mean time of a kind is kept for later runs if so many of its tests have run."""


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
    with_workers = f" with {timings.workers} workers" if timings.workers > 1 else ""
    text = (
        f"Time: about {duration_text(seconds / workers)}, an estimate from mean times on "
        f"{timings.where}{with_workers} ({timings.date})"
    )
    timed = {lane for lane, _ in timings.seconds}
    not_timed = {test.lane for test in tests if test.lane and not test.reason} - timed
    if not_timed:
        text += f"; nothing was timed on {', '.join(sorted(not_timed))}, which may take longer"
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
        if kind is None or not report.passed:  # a test that fails takes longer
            return
        self._seconds[kind] += report.duration
        self._tests[kind] += report.when == "call"

    def timings(self, workers: int) -> Timings:
        """The mean time of each kind of which enough tests have run. ``workers``: of xdist."""
        means = {
            kind: self._seconds[kind] / count
            for kind, count in self._tests.items()
            if count >= LEAST_TESTS
        }
        return Timings(means, "this machine", time.strftime("%Y-%m-%d"), workers)


def last_timings(config: pytest.Config) -> Timings:
    """Those of this machine's earlier runs; if there are none, those in ``MEASURED``."""
    cache = getattr(config, "cache", None)  # None under pytest -p no:cacheprovider
    kept: Any = cache.get(_cache_key(), None) if cache is not None else None
    try:
        seconds = {(lane, int(ranks)): float(mean) for lane, ranks, mean in kept["seconds"]}
        timings = Timings(seconds, "this machine", str(kept["date"]), int(kept["workers"]))
    except (TypeError, KeyError, ValueError):
        return MEASURED
    return timings if seconds else MEASURED


def keep_timings(config: pytest.Config, timings: Timings) -> None:
    """Keep these timings for the next run; if they are few, keep those that are there."""
    cache = getattr(config, "cache", None)
    if cache is None or len(timings.seconds) < len(last_timings(config).seconds) / 2:
        return
    means = [[*kind, round(mean, 4)] for kind, mean in sorted(timings.seconds.items())]
    kept = {"date": timings.date, "workers": timings.workers, "seconds": means}
    cache.set(_cache_key(), kept)


def _cache_key() -> str:
    return CACHE_KEY.format(gpus=len(cuda_devices()), torch=torch.__version__)
