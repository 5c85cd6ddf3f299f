"""The plan of a run of the suite: its tests, the cases of each lane, and how long it takes."""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.pytest_plugin.suite_run import SELECTION
from ddp_equivalence.ranks import lanes
from ddp_equivalence.ranks.lanes import cuda_devices
from ddp_equivalence.report.text import Line, plural
from ddp_equivalence.strategies.trial import Trial

# The plan of a run: how many cases each lane gets, and what will not run and why.

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


# What ``ddp-equivalence run`` and ``record`` leave out unless they are called with ``--all``.

LIKE_THE_CONTROLLER = "ddp_equivalence_selects"
"""The key of xdist's ``workerinput`` under which a worker finds whether it selects."""

COUNTS = "ddp_equivalence_selected"
"""The key of xdist's ``workeroutput`` under which a worker leaves the counts."""

TIMES_OF_A_DIFFERENCE = 3
"""Of the time of a trial that is the same: about as many runs of its step."""


@dataclass(frozen=True)
class Selected:
    """How many tests are run, of those that this machine can run."""

    tests: int
    of: int

    @property
    def text(self) -> str:
        """The counts, and how to run the rest."""
        return f"selected {self.tests:,} of {self.of:,} (pairwise); --all runs the rest"


class PairwiseSelection:
    """Registered in every process of a run with ``--ddp-pairwise``.

    ``selected``: None until tests are collected, and where the user has chosen tests: all of those
    run. Tests that will be skipped stay, and are not counted: the closing table lists them.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        worker_input: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._selects = (
            not _user_chose(config) if worker_input is None else worker_input[LIKE_THE_CONTROLLER]
        )
        self.selected: Selected | None = None

    @property
    def after(self) -> list[Line]:
        """What ends the closing table."""
        return [] if self.selected is None else [Line(f"Tests: {self.selected.text}")]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[LIKE_THE_CONTROLLER] = self._selects

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        counts = getattr(node, "workeroutput", {}).get(COUNTS)
        if counts is not None:
            self.selected = Selected(*counts)

    @pytest.hookimpl(trylast=True)  # the marks of skipped tests are set by then
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self._selects:
            return
        runs = [item for item in items if item.get_closest_marker("skip") is None]
        left_out = _left_out(runs)
        self.selected = Selected(len(runs) - len(left_out), len(runs))
        if hasattr(self._config, "workeroutput"):
            counts = [self.selected.tests, self.selected.of]
            self._config.workeroutput[COUNTS] = counts
        if left_out:
            self._config.hook.pytest_deselected(items=list(left_out))
            items[:] = [item for item in items if item not in left_out]


def selected(config: pytest.Config) -> Selected | None:
    """What this process has selected; None if nothing was left out."""
    selection = config.pluginmanager.get_plugin(SELECTION)
    return None if selection is None else selection.selected


def _user_chose(config: pytest.Config) -> bool:
    """True if the command line names tests."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    options = ("keyword", "markexpr", "lf")
    return named or any(getattr(config.option, name, None) for name in options)


def cost_of(trial: Trial) -> float:
    """About how long a trial takes, in no unit: it grows with its ranks, and where a strategy is
    known to differ, they run again and are watched.
    """
    return trial.case.ranks.world_size * (TIMES_OF_A_DIFFERENCE if trial.cause else 1)


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests without which every pair of values is still there. Their order does not matter."""
    of_catalogue, of_faults = dict[pytest.Item, dict[str, object]](), {}
    costs = dict[pytest.Item, float]()
    for item in sorted(items, key=lambda one: one.nodeid):
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        trial = item.get_closest_marker("trial")
        if trial is not None and "trial" in parameters:
            *_, lane = trial.args
            of_catalogue[item] = {**parameters["trial"].factors, "lane": lane}
            costs[item] = cost_of(parameters["trial"])
        elif "fault_trial" in parameters:
            of_faults[item] = parameters["fault_trial"].factors
            costs[item] = cost_of(parameters["fault_trial"].trial)
    left_out: set[pytest.Item] = set()
    for tests in (of_catalogue, of_faults):
        chosen = set(covering(list(tests.values()), [costs[item] for item in tests]))
        left_out |= {item for number, item in enumerate(tests) if number not in chosen}
    return left_out


# Pairwise selection: few tests in which every pair of values meets that meets in any test.
#
# Most faults of programs need one value or two that come together (Kuhn, Wallace and Gallo,
# "Software Fault Interactions and Implications for Software Testing", IEEE TSE 30(6), 2004). The
# known tools make up new combinations; here the tests are given, and few of them are chosen.

Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs_of(factors: Mapping[str, object]) -> frozenset[Pair]:
    """All pairs of a test's values. ``factors``: name of a factor -> its value in the test."""
    return frozenset(combinations(sorted(factors.items(), key=lambda factor: factor[0]), 2))


def covering(tests: Sequence[Mapping[str, object]], costs: Sequence[float] = ()) -> list[int]:
    """The numbers of tests that have every pair of values that any of them has.

    Each is the one that adds most pairs for its cost to those before it, and the first of several.
    In the end those are dropped whose pairs all have others. So the choice is cheap, though not
    always the cheapest, and it is the same whenever the tests are. ``costs``: all alike if empty.
    """
    pairs = [pairs_of(test) for test in tests]
    costs = costs or [1.0] * len(tests)
    left = set[Pair]().union(*pairs)
    best_first = [(-len(one) / costs[number], number) for number, one in enumerate(pairs)]
    heapq.heapify(best_first)
    chosen = []
    while left:
        _, number = heapq.heappop(best_first)
        adds = -len(pairs[number] & left) / costs[number]
        if best_first and (adds, number) > best_first[0]:
            heapq.heappush(best_first, (adds, number))
            continue
        chosen.append(number)
        left -= pairs[number]
    return sorted(_needed(chosen, pairs, costs))


def _needed(
    chosen: Sequence[int], pairs: Sequence[frozenset[Pair]], costs: Sequence[float]
) -> list[int]:
    """The chosen ones without those that others make superfluous, the dearest first."""
    times = Counter(pair for number in chosen for pair in pairs[number])
    needed = list(chosen)
    for number in sorted(chosen, key=lambda one: (-costs[one], one)):
        if all(times[pair] > 1 for pair in pairs[number]):
            needed.remove(number)
            times.subtract(pairs[number])
    return needed


# How long a run will take: an estimate from the mean times that tests took before.
#
# Means and not medians, because the few tests that start ranks take much longer than all others,
# and a run takes the sum of all.

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


# Under xdist the workers collect the tests: the first one hands its plan over to the controller.
#
# With it goes how many tests were selected. It writes both to a file, since xdist itself tells
# the controller only the ids of the tests.

FILE = "ddp_equivalence_plan"
"""The key of xdist's ``workerinput`` under which a worker finds the path of the file."""


class PlanHandedOver:
    """Registered in a worker: writes the plan once the tests are collected."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(tryfirst=True)  # before xdist tells the controller that the file is there
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        tests = [asdict(test) for test in planned(session.items)]
        counts = selected(session.config)
        plan = {"tests": tests, "selected": None if counts is None else asdict(counts)}
        self._file.write_text(json.dumps(plan), encoding="utf-8")


def file_for(config: pytest.Config) -> Path | None:
    """Where this process is to write its plan; None if it is no worker that has to."""
    worker_input: dict[str, Any] = getattr(config, "workerinput", {})
    path = worker_input.get(FILE)
    return None if path is None else Path(path)


def read(file: Path) -> tuple[list[PlannedTest], Selected | None]:
    """The plan that a worker has written; empty if the worker could not write it."""
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [], None
    counts = plan["selected"]
    tests = [PlannedTest(**test) for test in plan["tests"]]
    return tests, None if counts is None else Selected(**counts)
