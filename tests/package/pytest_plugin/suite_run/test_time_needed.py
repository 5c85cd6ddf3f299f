"""The estimate of a run's time, and the figures that it rests on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.suite_run import plan
from ddp_equivalence.pytest_plugin.suite_run.plan import (
    LEAST_TESTS,
    MEASURED,
    PlannedTest,
    Stopwatch,
    Timings,
    duration_text,
    estimate_text,
    keep_timings,
    last_timings,
    seconds_of,
)

TWO, FOUR = PlannedTest("two", "s", "1x2", "gloo"), PlannedTest("four", "s", "2x2", "gloo")
ON_NCCL = PlannedTest("nccl", "s", "2x2", "nccl")
TIMINGS = Timings(
    {("gloo", 2): 10.0, ("gloo", 4): 30.0, ("", 0): 5.0}, "this machine", "2026-11-22"
)


class Cache:
    """Stands for pytest's cache."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def get(self, key: str, otherwise: Any) -> Any:
        return self.kept.get(key, otherwise)

    def set(self, key: str, value: Any) -> None:
        self.kept[key] = value


def report(test: str, when: str, seconds: float, passed: bool = True) -> Any:
    return SimpleNamespace(nodeid=test, when=when, duration=seconds, passed=passed)


def test_the_estimate_is_the_sum_of_the_means_shared_by_the_workers() -> None:
    not_run = PlannedTest("no", "s", "1x2", "gloo", "needs 2 CUDA devices, found 0")
    tests = [TWO, FOUR, FOUR, PlannedTest("other"), not_run]
    assert estimate_text(tests, TIMINGS, 1) == (
        "Time: about 75 s, an estimate from mean times on this machine (2026-11-22)"
    )
    assert "about 38 s" in estimate_text(tests, TIMINGS, 2)


def test_a_lane_that_was_never_timed_counts_like_another_and_is_named() -> None:
    assert seconds_of(ON_NCCL, TIMINGS) == 30
    assert estimate_text([ON_NCCL, TWO], TIMINGS, 1).endswith(
        "(2026-11-22); nothing was timed on nccl, which may take longer"
    )


def test_what_a_complete_run_took_is_the_estimate_of_the_next() -> None:
    config: Any = SimpleNamespace(cache=Cache())
    assert last_timings(config) is MEASURED
    watch = Stopwatch({f"{lane}{number}": (lane, 2) for lane in "ab" for number in range(40)})
    for number in range(LEAST_TESTS):
        for when, seconds in (("setup", 0.5), ("call", 2.0), ("teardown", 0.5)):
            watch.add(report(f"a{number}", when, seconds))
    watch.add(report("b1", "call", 9.0))  # one test of its kind says little
    watch.add(report("a39", "call", 60.0, passed=False))
    timings = watch.timings(workers=2)
    assert timings.seconds == {("a", 2): 3.0}
    keep_timings(config, timings)  # of much less than a whole run
    assert last_timings(config) is MEASURED
    kinds = dict.fromkeys(MEASURED.seconds, 1.5)
    keep_timings(config, Timings(kinds, "this machine", "2026-11-23", workers=2))
    again = last_timings(config)
    assert (again.seconds, again.date, again.workers) == (kinds, "2026-11-23", 2)


def test_timings_with_other_gpus_or_another_torch_are_not_those_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: Any = SimpleNamespace(cache=Cache())
    keep_timings(config, Timings(MEASURED.seconds, "this machine", "2026-11-23"))
    assert last_timings(config) is not MEASURED
    with monkeypatch.context() as other:
        other.setattr("torch.__version__", "2.13.0+rehearsed")
        assert last_timings(config) is MEASURED
    monkeypatch.setattr(plan, "cuda_devices", lambda: ("0", "1"))
    assert last_timings(config) is MEASURED


@pytest.mark.parametrize("kept", [None, {}, {"seconds": [["gloo"]]}, {"seconds": []}, [1]])
def test_a_cache_that_cannot_be_read_counts_as_none(kept: object) -> None:
    cache = Cache()
    cache.get = lambda key, otherwise: kept  # type: ignore[method-assign]
    config: Any = SimpleNamespace(cache=cache)
    assert last_timings(config) is MEASURED
    assert last_timings(SimpleNamespace()) is MEASURED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (89, "89 s"), (200, "3 min"), (7800, "2 h 10 min")]
)
def test_a_duration_is_short(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
