"""The parts of a run of the suite that other runs lack: selection, plan, GPUs used, and record."""

from __future__ import annotations

import getpass
import heapq
import os
import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.pytest_plugin.results import RunResults, summary_lines, write_lines
from ddp_equivalence.ranks import lanes
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS
from ddp_equivalence.ranks.gpu_room import SEVERAL
from ddp_equivalence.ranks.gpus import Gpu, plain_uuid, visible_gpus
from ddp_equivalence.ranks.lanes import cuda_devices
from ddp_equivalence.ranks.nccl import Transport, transport
from ddp_equivalence.report.machine import SHORT, Box, box_lines, this_box, title
from ddp_equivalence.report.record import Record, versions
from ddp_equivalence.report.text import Line, Style, aligned, plural, write_file
from ddp_equivalence.strategies.trial import Trial

LEFT_BY_A_WORKER = "ddp_equivalence_plan"
"""The key of xdist's ``workeroutput``: the workers collect the tests, and not the controller."""

WHY_FEWER = "ranks of several workers would wait in turn for the same GPU"


def register(config: pytest.Config, results: RunResults) -> None:
    """Register what this process of the run needs. ``results`` are filled while tests run."""
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--ddp-pairwise") and not is_worker and _user_chose(config):
        config.option.ddp_pairwise = False  # xdist hands the options on to its workers
    fewer = ""
    if config.getoption("--ddp-suite-run") and not is_worker:
        fewer = fewer_workers(config, len(cuda_devices()))
    if config.getoption("--ddp-plan"):
        config.option.dist = "no"  # xdist starts no workers, which would run the tests
    config.pluginmanager.register(SuiteRun(config, results, fewer))


def _user_chose(config: pytest.Config) -> bool:
    """True if the command line names tests: all of those run."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    options = ("keyword", "markexpr", "lf")
    return named or any(getattr(config.option, name, None) for name in options)


def fewer_workers(config: pytest.Config, gpus: int) -> str:
    """Lower the number of xdist's workers to that of the GPUs, and return what was changed, or "".

    A set of ranks that works has its GPUs for itself: kernels of NCCL wait busily for the other
    ranks. More workers would wait for the GPU in turn, each with ranks of its own there.
    """
    given = config.getoption("numprocesses", None) or 0
    if not 0 < gpus < given:
        return ""
    if gpus == 1:
        config.option.dist, config.option.numprocesses, config.option.tx = "no", 0, []
        return f"-n {given} became one process, as there is one GPU: {WHY_FEWER}"
    config.option.numprocesses, config.option.tx = gpus, ["popen"] * gpus
    return f"-n {given} became -n {gpus}, one worker for each GPU: {WHY_FEWER}"


class SuiteRun:
    """Registered in every process of such a run.

    ``plan``: its lines, for the terminal and for the record. ``selected``: how many tests were
    selected, or "" if all run.
    """

    def __init__(self, config: pytest.Config, results: RunResults, fewer: str) -> None:
        self._config, self._results, self._fewer = config, results, fewer
        self._only_plans: bool = config.getoption("--ddp-plan")
        self._began = time.time()
        self._after: list[Line] = []
        self.plan: list[str] = []
        self.selected = ""

    @pytest.hookimpl(trylast=True)  # the marks of skipped tests are set by then
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._config.getoption("--ddp-pairwise"):
            runs = [item for item in items if item.get_closest_marker("skip") is None]
            left_out = left_out_by_pairs(runs)
            counts = f"selected {len(runs) - len(left_out):,} of {len(runs):,} (pairwise)"
            self.selected = f"Tests: {counts}; --all runs the rest"
            if left_out:
                self._config.hook.pytest_deselected(items=list(left_out))
                items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(tryfirst=True)  # before pytest asks for the lines that it prints then
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.plan = list(plan_lines([planned(item) for item in session.items]))
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[LEFT_BY_A_WORKER] = self.plan, self.selected

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        left = getattr(node, "workeroutput", {}).get(LEFT_BY_A_WORKER)
        self.plan, self.selected = left or (self.plan, self.selected)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionstart(self) -> Generator[None, object, object]:
        """Say what the machine has, before tests are collected."""
        result = yield
        terminal = self._terminal()
        if terminal is not None and (self._config.option.verbose >= 0 or self._only_plans):
            box = this_box()
            whole = box.has_gpus or self._only_plans
            machine = box_lines(box) if whole else [f"{title(box)}; torch {versions()['torch']}"]
            for line in (*([self._fewer] if self._fewer else []), *machine):
                terminal.write_line(line)
        return result

    def pytest_report_collectionfinish(self) -> list[str]:
        shows = self._config.option.verbose >= 0 or self._only_plans
        return self._whole_plan() if shows and self._terminal() is not None else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """With ``--plan`` nothing runs; but pytest itself stops the run on a broken file."""
        return True if self._only_plans and not session.testsfailed else None

    @pytest.hookimpl(trylast=True)  # when the workers of xdist have left the GPUs
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._only_plans or self._terminal() is None:
            return
        box = this_box()
        self._after += self._gpu_lines(box, session)
        folder: Path | None = self._config.getoption("--ddp-record")
        if folder is None:
            return
        try:
            path = write_page(folder, time.strftime("%Y-%m-%d"), box, self._page(box, session))
        except OSError as error:
            text = f"--record {folder}: FAILED, the page could not be written: {error.strerror}"
            self._after.append(Line(text, Style.BAD))
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        else:
            self._after.append(Line(f"This run is recorded in {path}"))

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._only_plans:
            selected = [Line(self.selected)] if self.selected else []
            write_lines(terminalreporter, [*selected, *self._after])

    def _terminal(self) -> pytest.TerminalReporter | None:
        """Where ``ddp-equivalence run`` writes. None in a worker, and for other commands."""
        is_shown = self._config.getoption("--ddp-suite-run")
        is_shown = is_shown and not hasattr(self._config, "workerinput")
        return self._config.pluginmanager.get_plugin("terminalreporter") if is_shown else None

    def _whole_plan(self) -> list[str]:
        return [*self.plan, *([self.selected] if self.selected else [])]

    def _gpu_lines(self, box: Box, session: pytest.Session) -> Iterator[Line]:
        """Which GPUs were used, and how NCCL sent data between them."""
        records = self._results.compared
        visible = visible_gpus(box.gpus.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        yield from gpu_lines(records, visible, box.devices)
        was_cut_short = session.shouldstop or session.shouldfail
        if session.exitstatus == pytest.ExitCode.INTERRUPTED or was_cut_short:
            return  # its user does not want to wait for the probe
        for backend in NCCL_BACKENDS:
            ranks = max((one.ranks for one in records if one.backend == backend), default=0)
            if ranks > 1:
                yield transport_line(transport(ranks, backend), ranks)

    def _page(self, box: Box, session: pytest.Session) -> Iterator[str]:
        stats = getattr(self._terminal(), "stats", {})
        words = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        workers = self._config.getoption("numprocesses", None) or 1
        by = "one pytest worker" if workers == 1 else f"{workers} pytest workers"
        counts = ", ".join(f"{len(stats[word])} {word}" for word in words if stats.get(word))
        yield f"The run took {time.time() - self._began:.0f} s with {by}: {counts}."
        yield f"Its exit code is {int(session.exitstatus)}."
        yield from _block("The machine", list(box_lines(box, with_uuids=False)))
        yield from _block("The plan", self._whole_plan())
        table = [*summary_lines(self._results, self._config.getoption("--must-run")), *self._after]
        yield from _block("Results", [line.text for line in table])
        failed = [one.nodeid for word in ("failed", "error") for one in stats.get(word, ())]
        if failed:
            yield from _block("Tests that did not pass", failed)


# Pairwise selection: few tests in which every pair of values meets that meets in any test.
#
# Most faults of programs need one value or two that come together (Kuhn, Wallace and Gallo,
# "Software Fault Interactions and Implications for Software Testing", IEEE TSE 30(6), 2004). The
# known tools make up new combinations; here the tests are given, and few of them are chosen.

TIMES_OF_A_DIFFERENCE = 3
"""A trial that is known to differ runs again and is watched: about as many runs of its step."""

Pair = tuple[tuple[str, object], tuple[str, object]]


def left_out_by_pairs(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests without which every pair of values is still there. Their order does not matter."""
    kinds = defaultdict[str, list[tuple[pytest.Item, dict[str, object], float]]](list)
    for item in sorted(items, key=lambda one: one.nodeid):
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        marker = item.get_closest_marker("trial")
        if marker is not None and "trial" in parameters:
            trial = parameters["trial"]
            factors = {**trial.factors, "lane": marker.args[2]}
            kinds["trials"].append((item, factors, cost_of(trial)))
        elif "fault_trial" in parameters:
            planted = parameters["fault_trial"]
            kinds["faults"].append((item, planted.factors, cost_of(planted.trial)))
    left_out = set[pytest.Item]()
    for tests in kinds.values():
        chosen = covering([one[1] for one in tests], [one[2] for one in tests])
        left_out |= {one[0] for one in tests} - {tests[number][0] for number in chosen}
    return left_out


def cost_of(trial: Trial) -> float:
    """About how long a trial takes, in no unit."""
    return trial.case.ranks.world_size * (TIMES_OF_A_DIFFERENCE if trial.cause else 1)


def covering(tests: Sequence[Mapping[str, object]], costs: Sequence[float] = ()) -> list[int]:
    """The numbers of tests that have every pair of values that any of them has.

    Each is the one that adds most pairs for its cost to those before it, and the first of several.
    In the end those are dropped whose pairs all have others, the dearest first. So the choice is
    cheap, though not always the cheapest, and it is the same whenever the tests are. ``costs``: all
    alike if empty.
    """
    pairs: list[frozenset[Pair]] = [
        frozenset(combinations(sorted(test.items(), key=lambda factor: factor[0]), 2))
        for test in tests
    ]
    costs = costs or [1.0] * len(tests)
    left = set[Pair]().union(*pairs)
    best_first = [(-len(one) / costs[number], number) for number, one in enumerate(pairs)]
    heapq.heapify(best_first)
    chosen: list[int] = []
    while left:
        _, number = heapq.heappop(best_first)
        adds = -len(pairs[number] & left) / costs[number]
        if best_first and (adds, number) > best_first[0]:
            heapq.heappush(best_first, (adds, number))
            continue
        chosen.append(number)
        left -= pairs[number]
    times = Counter(pair for number in chosen for pair in pairs[number])
    for number in sorted(chosen, key=lambda one: (-costs[one], one)):
        if all(times[pair] > 1 for pair in pairs[number]):
            chosen.remove(number)
            times.subtract(pairs[number])
    return sorted(chosen)


# The plan of a run: how many cases each lane gets, and what will not run and why.


@dataclass(frozen=True)
class PlannedTest:
    """A test that pytest has collected.

    ``layout`` and ``lane`` are those of its trial, and "" for a test that is not in the catalogue:
    it chooses its lane when it runs. ``reason``: why it will not run, or "".
    """

    layout: str = ""
    lane: str = ""
    reason: str = ""

    @property
    def ranks(self) -> int:
        """The number of ranks of its trial."""
        return parse(self.layout).world_size


def planned(item: pytest.Item) -> PlannedTest:
    """The part of a collected test that the plan counts."""
    trial, skip = item.get_closest_marker("trial"), item.get_closest_marker("skip")
    _, layout, lane = trial.args if trial else ("", "", "")
    reason = ""
    if skip is not None:
        reason = skip.kwargs.get("reason") or next(iter(skip.args), "it is marked to be skipped")
    return PlannedTest(layout, lane, reason)


def plan_lines(tests: Sequence[PlannedTest]) -> Iterator[str]:
    """A line for each lane, and one for each reason why tests will not run."""
    runs = [test for test in tests if not test.reason]
    left_out = [test for test in tests if test.reason]
    without = f", of which {len(left_out)} will not run" if left_out else ""
    yield f"Plan: {len(tests)} {plural(len(tests), 'test')}{without}"
    width = max(len("NOT RUN"), *(len(test.lane) for test in tests), 0) + 2
    for lane, count in Counter(test.lane for test in runs if test.lane).most_common():
        on_lane = sorted((test for test in runs if test.lane == lane), key=lambda one: one.ranks)
        fewest, most = on_lane[0].ranks, on_lane[-1].ranks
        ranks = f"{plural(most, 'rank')}" if fewest == most else f"to {most} ranks"
        text = f"{count} {plural(count, 'case')} on {fewest} {ranks}"
        if lane == "gloo_fallback":  # NCCL cannot even run the smallest of these
            text += f": {lanes.choose(parse(on_lane[0].layout)).reason}"
        yield f"  {lane:<{width}}{text}"
    others = sum(not test.lane for test in runs)
    if others:
        text = "right code that looks wrong, and planted faults; each chooses its lane when it runs"
        yield f"  {'others':<{width}}{others} {plural(others, 'test')}: {text}"
    reasons = Counter((test.lane, test.reason) for test in left_out)
    for (lane, reason), count in reasons.most_common():
        what = f"{plural(count, 'case')} on {lane}" if lane else plural(count, "test")
        yield f"  {'NOT RUN':<{width}}{count} {what}: {reason}"


# Which GPUs the cases of a run used, by which ranks, and which GPU of the machine no case used.

HEADER = "cases by GPU"


def gpu_lines(compared: Sequence[Record], gpus: Sequence[Gpu], devices: int) -> Iterator[Line]:
    """A row for each GPU; none if no check says on which GPU it ran.

    ``gpus``: those that the ranks may use, as far as NVML names them. ``devices``: their number.
    """
    names = {
        plain_uuid(uuid): _name(gpu) for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids) if uuid
    }
    cases: dict[str, Counter[str]] = {_name(gpu): Counter() for gpu in gpus}
    ranks = defaultdict[str, set[int]](set)
    for record in compared:
        of_case = set[str]()
        for rank, uuids in enumerate(record.gpu.split(", ") if record.gpu else ()):
            on = {names.get(plain_uuid(one), one[:SHORT]) for one in uuids.split(SEVERAL)}
            for name in on:
                ranks[name].add(rank)
            of_case |= on
        for name in sorted(of_case):
            cases.setdefault(name, Counter())[record.backend] += 1
    if not ranks:
        return
    lanes_used = sorted({lane for counts in cases.values() for lane in counts})
    rows = [(f"{name}  ", *(of[lane] or "–" for lane in lanes_used)) for name, of in cases.items()]
    head, *lines = aligned([(f"{HEADER}  ", *lanes_used), *rows])
    yield Line(f"{head}    ranks that ran on it")
    for name, line in zip(cases, lines, strict=True):
        on_it = ", ".join(map(str, sorted(ranks[name]))) or "no case used it"
        yield Line(f"{line}    {on_it}", Style.PLAIN if ranks[name] else Style.UNCERTAIN)
    if not gpus and devices > len(cases):
        unknown = devices - len(cases)
        others = f"{unknown} other CUDA {plural(unknown, 'device')}"
        yield Line(f"no case used {others}, which NVML did not name", Style.UNCERTAIN)


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}, {gpu.name or 'name unknown'}"


def transport_line(used: Transport, ranks: int) -> Line:
    """The transport that NCCL chose in the probe after the run."""
    if used.problem:
        return Line(f"NCCL's transport is not known: {used.problem}", Style.UNCERTAIN)
    chosen = ", ".join(
        f"{name} for {count} {plural(count, 'pair')} of ranks"
        for name, count in used.counts.items()
    )
    return Line(f"NCCL's transport, in a probe with {ranks} ranks on one node: {chosen}")


# ``ddp-equivalence run --record``: the machine, the plan and the results as one Markdown page.
#
# Pages are published, so a page holds no name of a host or of a user, no path, and no UUID of a
# GPU.

PATH = re.compile(r"(?<![\w.:/])~?/(?:[\w.+@~-]+/)*[\w.+@~-]+/?")
UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}")

SAID_OF_ALL = ("", "root", "localhost")
"""Such names tell nothing of a machine. "root cause" is a part of reports."""

LONGEST_BLOCK = 200
"""So many lines of a block are written: of a list of failed tests, a reader needs the first."""


def _block(heading: str, lines: Sequence[str]) -> Iterator[str]:
    yield from ("", f"## {heading}", "", "```", *lines[:LONGEST_BLOCK])
    if len(lines) > LONGEST_BLOCK:
        yield f"... and {len(lines) - LONGEST_BLOCK} more"
    yield "```"


def write_page(folder: Path, date: str, box: Box, lines: Iterator[str]) -> Path:
    """Write the page of a run into the folder, and return its path. Raises OSError."""
    head = (
        f"# {date}: {title(box)}\n\n"
        "This page was written by `ddp-equivalence run --record`. To compare it with another\n"
        "machine, run the same command there, and read the two pages side by side.\n"
    )
    text = "\n".join(without_private(line) for line in (head, *lines)) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    gpus, _, _ = without_private(title(box)).rpartition(", ")
    machine = re.sub(r"[^a-z0-9]+", "-", gpus.lower()).strip("-") if box.has_gpus else "cpu"
    number = 1
    while True:
        path = folder / f"{date}-{machine}{'' if number == 1 else f'-{number}'}.md"
        if not path.exists():
            write_file(path, text)
            return path
        number += 1  # it is of another run of the same day


def without_private(text: str) -> str:
    """The text without paths, UUIDs of GPUs, and the names of this host and this user."""
    text = UUID.sub("(UUID)", PATH.sub("(path)", text))
    private = {socket.gethostname(): "(host)"}
    with suppress(OSError, KeyError, ImportError):  # the user may have no name
        private[getpass.getuser()] = "(user)"
    for name, instead in private.items():
        if name not in SAID_OF_ALL:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text
