"""What has changed in whole tests: whether they run, pass, and how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.gate.finding import Seen
from ddp_equivalence.gate.recorded import Recorded, RecordedTest

LEAST_SECONDS = 0.5
"""A test that takes so much longer, and no less, may be slower: shorter times are noise."""

LEAST_OF_ALL_SECONDS = 10.0
"""The same of a whole run, which starts ranks and imports torch."""


def changed_tests(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    """Compare the tests of both records, and the time that they take."""
    for record in (old, new):
        yield from _incomplete(record)
    for name, before in old.tests.items():
        after = new.tests.get(name)
        if after is None:
            yield Seen("vanished", name, f"it {_did(before)} before")
        elif not _says_so_itself(old, new, name):
            yield from _changed(name, before, after)
    for name, after in new.tests.items():
        if name not in old.tests:
            yield Seen("appeared", name, f"it {_did(after)}")
    yield from _slower(old, new, ratios)


def _incomplete(record: Recorded) -> Iterator[Seen]:
    if record.end is None:
        text = f"the run was cut off after {len(record.tests)} tests"
        yield Seen("incomplete", record.name, text)
    if not any(one.outcome in ("same", "different") for one in record.checks.values()):
        yield Seen("nothing_compared", record.name, f"{len(record.tests)} tests compared nothing")


def _says_so_itself(old: Recorded, new: Recorded, name: str) -> bool:
    """True if a check of a test that fails now, or did before, has another outcome than before."""
    if "skipped" in (old.tests[name].outcome, new.tests[name].outcome):
        return False
    pairs = zip(old.checks_of(name), new.checks_of(name), strict=False)
    return any(before.outcome != after.outcome for before, after in pairs)


def _changed(name: str, before: RecordedTest, after: RecordedTest) -> Iterator[Seen]:
    if after.outcome == before.outcome:
        return
    reason = f": {after.reason}" if after.reason else ""
    text = f"{before.outcome} -> {after.outcome}{reason}"
    if after.outcome == "skipped":
        yield Seen("stopped_running", name, text)
    elif after.outcome == "passed":
        yield Seen("test_passes", name, text)
    else:
        yield Seen("test_failed", name, text)


def _did(test: RecordedTest) -> str:
    return {"passed": "passed", "failed": "failed"}.get(test.outcome, f"was {test.outcome}")


def _slower(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    """Each test beside the others: where all take longer, the machine does, or the whole run."""
    pairs: dict[str, tuple[float, float]] = {}
    for name, test in old.tests.items():
        same = new.tests.get(name)
        if same is not None and test.outcome == same.outcome == "passed":
            pairs[name] = test.seconds, same.seconds
    if not pairs:
        return
    long = [after / before for before, after in pairs.values() if before > 0.05]
    usual = max(1.0, median(long)) if long else 1.0
    for name, (before, after) in pairs.items():
        expected = before * usual
        if after > ratios["seconds"] * expected and after - expected > LEAST_SECONDS:
            yield Seen("slower", name, _times(before, after, usual))
    total = (sum(one for one, _ in pairs.values()), sum(one for _, one in pairs.values()))
    if total[1] > max(ratios["total_seconds"] * total[0], total[0] + LEAST_OF_ALL_SECONDS):
        yield Seen("total_slower", new.name, _times(*total, 1.0))
    yield from _more_memory(old, new, ratios)


def _times(before: float, after: float, usual: float) -> str:
    text = f"{before:.2f} s -> {after:.2f} s"
    beside = f", while the others take {text_of(usual, '.2g')} times as long" if usual > 1 else ""
    return f"{text}: {text_of(after / before, '.2g') if before else 'many'} times as long{beside}"


def _more_memory(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    before, after = (
        float(record.end.get("peak_mib", 0.0)) if record.end is not None else 0.0
        for record in (old, new)
    )
    if before and after > ratios["memory"] * before:
        yield Seen("memory_grew", new.name, f"{before:.0f} MiB -> {after:.0f} MiB at the peak")
