"""What has changed in whole tests: whether they run, pass, and how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.gate.finding import Seen
from ddp_equivalence.gate.recorded import Recorded, RecordedTest
from ddp_equivalence.gate.rules_of_checks import is_worse
from ddp_equivalence.report.wrapping import plural

LEAST_SECONDS = 10.0
"""A test that takes so much longer, and no less, may be slower. Shorter times are noise: the first
test of a process imports torch, and others wait while the machine starts ranks."""

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
        after = new.tests.get(name)
        if after is None:
            yield Seen("vanished", name, f"it {_did(before)} before")
        else:
            yield from _changed(old, new, name, before, after)
    for name, after in new.tests.items():
        if name not in old.tests:
            kind = "appeared_failing" if after.outcome == "failed" else "appeared"
            yield Seen(kind, name, f"it {_did(after)}{_because(after)}")
    yield from _slower(old, new, ratios)
    yield from _more_memory(old, new, ratios)


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
    pairs: dict[str, tuple[float, float]] = {}
    for name, test in old.tests.items():
        same = new.tests.get(name)
        if same is None or same.starts != test.starts:
            continue  # ranks stay for the tests that follow: one of them pays for their start
        if test.outcome == same.outcome == "passed":
            pairs[name] = test.seconds, same.seconds
    long = {name: after / before for name, (before, after) in pairs.items() if before > LONG}
    for name, (before, after) in pairs.items():
        if after - before <= LEAST_SECONDS:
            continue
        others = [ratio for other, ratio in long.items() if other != name]
        usual = max(1.0, median(others)) if others else 1.0
        expected = before * usual
        if after > ratios["seconds"] * expected and after - expected > LEAST_SECONDS:
            yield Seen("slower", name, _times(before, after, usual))
    total = (sum(one for one, _ in pairs.values()), sum(one for _, one in pairs.values()))
    if total[1] > max(ratios["total_seconds"] * total[0], total[0] + LEAST_OF_ALL_SECONDS):
        yield Seen("total_slower", new.name, _times(*total, 1.0))


def _times(before: float, after: float, usual: float) -> str:
    text = f"{before:.2f} s -> {after:.2f} s"
    beside = f", while the others take {text_of(usual, '.2g')} times as long" if usual > 1 else ""
    return f"{text}: {text_of(after / before, '.2g') if before else 'many'} times as long{beside}"


def _more_memory(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    before, after = old.peak_mib, new.peak_mib
    if before and after > ratios["memory"] * before:
        yield Seen("memory_grew", new.name, f"{before:.0f} MiB -> {after:.0f} MiB at the peak")
