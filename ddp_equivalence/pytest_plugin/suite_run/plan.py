"""The plan of a run: how many cases each lane gets, and what will not run and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import lanes
from ddp_equivalence.report.wrapping import plural

FALLBACK = "gloo_fallback"


@dataclass(frozen=True)
class PlannedTest:
    """A test that pytest has collected.

    ``strategy``, ``layout`` and ``lane`` are those of its trial. They are "" for a test that is not
    in the catalogue: it chooses its lane when it runs. ``reason``: why it will not run, or "".
    """

    id: str
    strategy: str = ""
    layout: str = ""
    lane: str = ""
    reason: str = ""

    @property
    def ranks(self) -> int:
        """The number of ranks of its trial; 0 for a test that is not in the catalogue."""
        return parse(self.layout).world_size if self.layout else 0


def planned(items: Sequence[pytest.Item]) -> list[PlannedTest]:
    """The tests that pytest has collected, in the order in which they will run."""
    return [_planned(item) for item in items]


def _planned(item: pytest.Item) -> PlannedTest:
    trial, skip = item.get_closest_marker("trial"), item.get_closest_marker("skip")
    strategy, layout, lane = trial.args if trial else ("", "", "")
    reason = ""
    if skip is not None:
        reason = skip.kwargs.get("reason") or next(iter(skip.args), "it is marked to be skipped")
    return PlannedTest(item.nodeid, strategy, layout, lane, reason)


def plan_lines(tests: Sequence[PlannedTest]) -> Iterator[str]:
    """The whole plan: a line for each lane, and one for each reason why tests will not run."""
    runs, left_out = _divided(tests)
    without = f", of which {len(left_out)} will not run" if left_out else ""
    yield f"Plan: {len(tests)} {plural(len(tests), 'test')}{without}"
    width = max(len("NOT RUN"), *(len(test.lane) for test in tests), 0) + 2
    for lane, count in _cases_of_lanes(runs).items():
        on_lane = [test for test in runs if test.lane == lane]
        text = f"{count} {plural(count, 'case')} on {_ranks_text(on_lane)}"
        reason = _why_fallback(on_lane) if lane == FALLBACK else ""
        yield f"  {lane:<{width}}{text}{reason and f': {reason}'}"
    others = sum(not test.lane for test in runs)
    if others:
        text = "right code that looks wrong, and planted faults; each chooses its lane when it runs"
        yield f"  {'others':<{width}}{others} {plural(others, 'test')}: {text}"
    reasons = Counter((test.lane, test.reason) for test in left_out)
    for (lane, reason), count in reasons.most_common():
        what = f"{count} {plural(count, 'case')} on {lane}" if lane else _tests(count)
        yield f"  {'NOT RUN':<{width}}{what}: {reason}"


def plan_in_short(tests: Sequence[PlannedTest]) -> str:
    """The plan in one line."""
    runs, left_out = _divided(tests)
    cases = _cases_of_lanes(runs)
    parts = [f"{count} {plural(count, 'case')} on {lane}" for lane, count in cases.items()]
    others = sum(not test.lane for test in runs)
    if others:
        parts.append(f"{others} other {plural(others, 'test')}")
    if left_out:
        parts.append(f"{len(left_out)} that will not run (--plan says why)")
    return f"Plan: {', '.join(parts) or 'nothing'}"


def _divided(tests: Sequence[PlannedTest]) -> tuple[list[PlannedTest], list[PlannedTest]]:
    """The tests that will run, and those that will not."""
    runs = [test for test in tests if not test.reason]
    return runs, [test for test in tests if test.reason]


def _cases_of_lanes(tests: Sequence[PlannedTest]) -> dict[str, int]:
    """Lane -> number of its cases; the lane with the most cases comes first."""
    return dict(Counter(test.lane for test in tests if test.lane).most_common())


def _ranks_text(tests: Sequence[PlannedTest]) -> str:
    fewest, most = min(test.ranks for test in tests), max(test.ranks for test in tests)
    return f"{most} {plural(most, 'rank')}" if fewest == most else f"{fewest} to {most} ranks"


def _why_fallback(tests: Sequence[PlannedTest]) -> str:
    """Why NCCL cannot run the smallest of these tests."""
    smallest = min(tests, key=lambda test: test.ranks)
    return lanes.choose(parse(smallest.layout)).reason


def _tests(count: int) -> str:
    return f"{count} {plural(count, 'test')}"
