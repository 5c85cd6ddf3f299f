"""What has changed in the verdicts, errors, limits and bits of single checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.gate.finding import Seen
from ddp_equivalence.gate.recorded import Recorded, RecordedCheck, RecordedTest

GOOD = "same"


def changed_checks(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    """Compare the checks that both have made, and say which one has not."""
    for (test, number), before in old.checks.items():
        name = name_of_check(old, test, number)
        after = new.checks.get((test, number))
        if after is not None:
            yield from _changed(name, before, after, ratios)
        elif _runs(new.tests.get(test)):
            yield Seen("vanished", name, f"its test runs without it; it was {before.outcome}")
    for (test, number), after in new.checks.items():
        if (test, number) not in old.checks and _runs(old.tests.get(test)):
            yield Seen("appeared", f"{test} (check {number + 1})", after.outcome)


def name_of_check(old: Recorded, test: str, number: int) -> str:
    """The test, and which of its checks, if the old record has several of it."""
    return f"{test} (check {number + 1})" if (test, 1) in old.checks else test


def _runs(test: RecordedTest | None) -> bool:
    return test is not None and test.outcome != "skipped"


def _changed(
    name: str, before: RecordedCheck, after: RecordedCheck, ratios: Mapping[str, float]
) -> Iterator[Seen]:
    yield from _other_check(name, before, after)
    if after.outcome != before.outcome:
        better = before.outcome != after.expected and after.outcome == after.expected
        kind = "verdict_better" if better else "verdict_worse"
        yield Seen(kind, name, f"{_verdict(before)} -> {_verdict(after)}{_error(after)}")
    elif after.cause != before.cause:
        yield Seen("cause_changed", name, f"{_verdict(before)} -> {_verdict(after)}")
    elif after.outcome == GOOD:
        yield from _within_the_limit(name, before, after, ratios)
    if after.outcome == before.outcome and _bits_differ(before, after):
        yield Seen("digest_changed", name, f"on {len(after.digests)} ranks")


def _other_check(name: str, before: RecordedCheck, after: RecordedCheck) -> Iterator[Seen]:
    """What makes it another check, whatever its verdict is."""
    if after.expected != before.expected:
        yield Seen("expected_otherwise", name, f"{before.expected} -> {after.expected}")
    if after.lane != before.lane:
        yield Seen("lane_changed", name, f"{before.lane} -> {after.lane}")
    if after.dtype != before.dtype:
        yield Seen("compared_less", name, f"in {after.dtype}, and in {before.dtype} before")
    for what in ("ranks", "parameters", "elements"):
        counts = getattr(before, what), getattr(after, what)
        if counts[1] < counts[0]:
            yield Seen("compared_less", name, f"{counts[1]} {what}, and {counts[0]} before")
            return


def _within_the_limit(
    name: str, before: RecordedCheck, after: RecordedCheck, ratios: Mapping[str, float]
) -> Iterator[Seen]:
    noise = max(before.floor or 0.0, after.floor or 0.0)
    usual = max(before.error or 0.0, noise)
    if after.error is not None and 0 < ratios["error"] * usual < after.error:
        text = f"error {_digits(before.error or 0.0)} -> {_digits(after.error)}"
        beside = f"limit {_digits(after.limit or 0.0)}, rounding {_digits(noise)}"
        yield Seen("error_grew", name, f"{text}, {beside}: {_times(after.error / usual)}")
    if after.limit and before.limit and after.limit > ratios["limit"] * before.limit:
        text = f"limit {_digits(before.limit)} -> {_digits(after.limit)}"
        yield Seen("limit_grew", name, f"{text}: {_times(after.limit / before.limit)}")


def _times(ratio: float) -> str:
    return f"{text_of(ratio, '.3g')} times as much"


def _digits(value: float) -> str:
    return text_of(value, ".2g")


def _verdict(check: RecordedCheck) -> str:
    return f"{check.outcome} [{check.cause}]" if check.cause else check.outcome


def _error(check: RecordedCheck) -> str:
    if check.error is None or check.limit is None:
        return ""
    return f", error {_digits(check.error)}, limit {_digits(check.limit)}"


def _bits_differ(before: RecordedCheck, after: RecordedCheck) -> bool:
    return bool(before.digests and after.digests) and before.digests != after.digests
