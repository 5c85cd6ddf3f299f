"""What has changed in whole tests: whether they run, pass, and how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.gate.finding import Seen
from ddp_equivalence.gate.recorded import OF_SUITE, Recorded, RecordedTest
from ddp_equivalence.gate.rules_of_checks import is_worse
from ddp_equivalence.report.wrapping import plural

LEAST_SECONDS = 10.0
"""A test that takes so much longer, and no less, may wait longer. Shorter times are noise: the
first test of a process imports torch, and others wait while the machine starts ranks. Even 10.8 s
instead of 0.1 s was seen once without any change, on a machine that other programs kept busy: only
processor time makes a test red."""

LEAST_CPU_SECONDS = 0.5
"""The same of processor time on each rank, which does not depend on what else the machine does. The
first test of a rank may need 0.2 s more, for modules that only then are imported.
"""

LEAST_OF_ALL_SECONDS = 10.0
"""The same of a whole run, which starts ranks and imports torch."""

LONG = 0.05
"""Shorter tests do not show how fast a machine is."""

NOTHING_COLLECTED = 5
"""Pytest's exit code of a run whose -k selects nothing."""


def changed_tests(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    """Compare the tests of both records, and the time that they take."""
    for record in (old, new):
        yield from _incomplete(record)
    for name, before in old.tests.items():
        if name in new.tests:
            yield from _changed(old, new, name, before, new.tests[name])
    yield from _only_in_one(old, new)
    yield from _slower(old, new, ratios)
    yield from _more_memory(old, new, ratios)


def _only_in_one(old: Recorded, new: Recorded) -> Iterator[Seen]:
    """Tests of one record only. What another selection left out is one finding."""
    gone = [name for name in old.tests if name not in new.tests]
    added = [name for name in new.tests if name not in old.tests]
    if _selected_otherwise(old, new):
        advice = "record both with one version of the suite, and with --all"
        for kind, names in (("vanished", gone), ("appeared", added)):
            not_selected = [name for name in names if name.startswith(OF_SUITE)]
            if not_selected:
                count = f"{len(not_selected)} {plural(len(not_selected), 'test')}"
                record = new.name if kind == "vanished" else old.name
                text = f"are not in {record}, such as {not_selected[0]}: {advice}"
                yield Seen(kind, f"{count} of the suite", text)
        gone = [name for name in gone if not name.startswith(OF_SUITE)]
        failed = [name for name in added if new.tests[name].outcome == "failed"]
        added = [*(name for name in added if not name.startswith(OF_SUITE)), *failed]
    for name in gone:
        yield Seen("vanished", name, f"it {_did(old.tests[name])} before")
    for name in dict.fromkeys(added):
        after = new.tests[name]
        kind = "appeared_failing" if after.outcome == "failed" else "appeared"
        yield Seen(kind, name, f"it {_did(after)}{_because(after)}")


def _selected_otherwise(old: Recorded, new: Recorded) -> bool:
    """True if the suite may have selected other tests: all or not, or from other tests."""
    if "pairwise" not in (old.suite, new.suite):
        return False
    return old.suite != new.suite or old.facts.get("source") != new.facts.get("source")


def _incomplete(record: Recorded) -> Iterator[Seen]:
    count = len(record.tests)
    tests = f"{count} {plural(count, 'test')}"
    if record.end is None:
        yield Seen("incomplete", record.name, f"the run was cut off after {tests}")
    elif record.collected > count:
        text = f"pytest collected {record.collected} tests, and ran {count}"
        yield Seen("incomplete", record.name, text)
    elif unusual := [code for code in record.exit_codes if code not in (0, 1, NOTHING_COLLECTED)]:
        text = f"pytest ended with exit code {unusual[0]} after {tests}"
        yield Seen("incomplete", record.name, text)
    elif 1 in record.exit_codes and all(one.outcome != "failed" for one in record.tests.values()):
        text = "pytest ended with exit code 1, although none of its tests failed"
        yield Seen("incomplete", record.name, text)
    if not any(one.outcome in ("same", "different") for one in record.checks.values()):
        yield Seen("nothing_compared", record.name, f"no gradients were compared in {tests}")


def _changed(
    old: Recorded, new: Recorded, name: str, before: RecordedTest, after: RecordedTest
) -> Iterator[Seen]:
    if after.outcome == before.outcome:
        if after.outcome != "passed" and after.reason != before.reason:
            text = f"{after.outcome}, before: {before.reason}; now: {after.reason}"
            yield Seen("failure_changed", name, text)
        return
    text = f"{before.outcome} -> {after.outcome}{_because(after)}"
    pairs = list(zip(old.checks_of(name), new.checks_of(name), strict=False))
    if after.outcome in ("skipped", "xfailed"):
        yield Seen("stopped_running", name, text)
    elif after.outcome == "failed":
        if not any(is_worse(*pair) for pair in pairs):  # that says it already
            yield Seen("test_failed", name, text)
    elif not any(one.outcome != other.outcome for one, other in pairs):
        yield Seen("test_passes", name, text)


def _because(test: RecordedTest) -> str:
    return f": {test.reason}" if test.reason else ""


def _did(test: RecordedTest) -> str:
    return test.outcome if test.outcome in ("passed", "failed") else f"was {test.outcome}"


def _slower(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    """Each test beside the others: where all take longer, the machine does, or the whole run."""
    both = list(_passed_in_both(old, new))
    # A test that starts ranks waits until they have imported torch: on a busy machine 11 s, where
    # it took one before. Its processor time is compared all the same.
    times = {name: (test.seconds, same.seconds) for name, test, same in both if not test.starts}
    on_each_rank: dict[str, tuple[float, float]] = {}
    for name, test, same in both:
        ranks = max((check.ranks or 1 for check in old.checks_of(name)), default=1)
        on_each_rank[name] = test.cpu_seconds / ranks, same.cpu_seconds / ranks
    what = " of processor time on each rank"
    slower = dict(_longer(on_each_rank, ratios["seconds"], LEAST_CPU_SECONDS, what))
    for name, text in slower.items():
        yield Seen("slower", name, text)
    for name, text in _longer(times, ratios["seconds"], LEAST_SECONDS):
        if name not in slower:
            yield Seen("waits_longer", name, text)
    totals = {
        " of processor time": [(test.cpu_seconds, same.cpu_seconds) for _, test, same in both]
    }
    if old.facts.get("workers") == new.facts.get("workers"):
        # Tests that run side by side with others take longer each.
        totals[""] = [(test.seconds, same.seconds) for _, test, same in both]
    for what, pairs in totals.items():
        before, after = sum(one for one, _ in pairs), sum(one for _, one in pairs)
        least = max(ratios["total_seconds"] * before, before + LEAST_OF_ALL_SECONDS)
        if before and after > least:
            yield Seen("total_slower", new.name, _times(before, after, 1.0, what))


def _passed_in_both(
    old: Recorded, new: Recorded
) -> Iterator[tuple[str, RecordedTest, RecordedTest]]:
    """The tests whose times can be compared. Ranks stay for the tests that follow, so that one of
    them pays for their start: it must have started as many in both.
    """
    for name, test in old.tests.items():
        same = new.tests.get(name)
        if same is None or same.starts != test.starts:
            continue
        if test.outcome == same.outcome == "passed":
            yield name, test, same


def _longer(
    times: Mapping[str, tuple[float, float]], ratio: float, least: float, what: str = ""
) -> Iterator[tuple[str, str]]:
    """The tests that take so many times as long as before, and at least so many seconds longer,
    each with a text.
    """
    ratios = {name: after / before for name, (before, after) in times.items() if before > LONG}
    for name, (before, after) in times.items():
        if not before or after - before <= least:  # earlier records have no processor time
            continue
        others = [one for other, one in ratios.items() if other != name]
        usual = max(1.0, median(others)) if others else 1.0
        expected = before * usual
        if after > ratio * expected and after - expected > least:
            yield name, _times(before, after, usual, what)


def _times(before: float, after: float, usual: float, what: str = "") -> str:
    text = f"{before:.2f} s -> {after:.2f} s{what}"
    beside = f", while the others take {text_of(usual, '.2g')} times as long" if usual > 1 else ""
    return f"{text}: {text_of(after / before, '.2g') if before else 'many'} times as long{beside}"


def _more_memory(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    before, after = old.peak_mib, new.peak_mib
    if before and after > ratios["memory"] * before:
        yield Seen("memory_grew", new.name, f"{before:.0f} MiB -> {after:.0f} MiB at the peak")
