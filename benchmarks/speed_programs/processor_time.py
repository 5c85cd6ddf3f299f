"""The processor time of this process and of its ranks, while they stay the same ones."""

from __future__ import annotations

import os

import psutil

WARM_UP = 5
"""The first checks do not count."""

CHECKS = int(os.environ["BENCHMARK_CHECKS"])

_measured: list[float] = []


def check_begins(number: int) -> None:
    """Call this at the start of every check, counted from 0. Only two of them are looked at."""
    if number in (WARM_UP, CHECKS - 1):
        own = psutil.Process()
        times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
        _measured.append(sum(one.user + one.system for one in times))


def of_a_check() -> float | None:
    """Seconds of a check between the two; None if there are no two."""
    if len(_measured) < 2:
        return None
    return (_measured[1] - _measured[0]) / (CHECKS - 1 - WARM_UP)
