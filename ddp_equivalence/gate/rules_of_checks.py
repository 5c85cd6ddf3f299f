"""What has changed in the verdicts, errors, limits and bits of single checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.gate.finding import Seen
from ddp_equivalence.gate.recorded import Recorded, RecordedCheck, RecordedTest
from ddp_equivalence.report.wrapping import plural

GOOD = "same"


def changed_checks(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    """Compare the checks that both have made, and say which one has not."""
    gone: list[tuple[str, RecordedCheck]] = []
    added: list[tuple[str, RecordedCheck]] = []
    for (test, number), before in old.checks.items():
        name = name_of_check(old, test, number)
        after = new.checks.get((test, number))
        if after is not None:
            yield from _changed(name, before, after, ratios)
        elif _runs(new.tests.get(test)):
            gone.append((name, before))
    for (test, number), after in new.checks.items():
        if (test, number) not in old.checks and _runs(old.tests.get(test)):
            added.append((f"{test} (check {number + 1})", after))
    yield from _gone_or_added(gone, added)


def _gone_or_added(
    gone: list[tuple[str, RecordedCheck]], added: list[tuple[str, RecordedCheck]]
) -> Iterator[Seen]:
    """A check of a fixture belongs to the test that runs first: it may have moved."""
    moved = Counter(kind_of(check) for _, check in gone)
    moved &= Counter(kind_of(check) for _, check in added)
    for checks, finding in ((gone, "vanished"), (added, "appeared")):
        left = moved.copy()
        for name, check in checks:
            if left[kind_of(check)]:
                left[kind_of(check)] -= 1
            elif finding == "vanished":
                yield Seen("vanished", name, f"its test runs without it; it was {check.outcome}")
            elif check.outcome == check.expected:
                yield Seen("appeared", name, check.outcome)
            else:
                yield Seen("appeared_failing", name, _verdict(check))


def kind_of(check: RecordedCheck) -> tuple[object, ...]:
    """What two checks have in common that compare the same, with the same verdict."""
    return (
        *(check.strategy, check.layout, check.lane, check.dtype, check.outcome, check.cause),
        *(check.ranks, check.parameters, check.elements),
    )


def name_of_check(old: Recorded, test: str, number: int) -> str:
    """The test, and which of its checks, if the old record has several of it."""
    return f"{test} (check {number + 1})" if (test, 1) in old.checks else test


def is_worse(before: RecordedCheck, after: RecordedCheck) -> bool:
    """It has another outcome, and not the one that was asked for before."""
    return after.outcome != before.outcome and after.outcome != before.expected


def _runs(test: RecordedTest | None) -> bool:
    return test is not None and test.outcome not in ("skipped", "xfailed")


def _changed(
    name: str, before: RecordedCheck, after: RecordedCheck, ratios: Mapping[str, float]
) -> Iterator[Seen]:
    yield from _other_check(name, before, after)
    if after.outcome != before.outcome:
        kind = "verdict_worse" if is_worse(before, after) else "verdict_better"
        yield Seen(kind, name, f"{_verdict(before)} -> {_verdict(after)}{_error(after)}")
    elif after.cause != before.cause:
        yield Seen("cause_changed", name, f"{_verdict(before)} -> {_verdict(after)}")
    elif after.outcome == GOOD:
        yield from _within_the_limit(name, before, after, ratios)
    if after.outcome == before.outcome and _bits_differ(before, after):
        count = len(after.digests)
        yield Seen("digest_changed", name, f"on {count} {plural(count, 'rank')}")


def _other_check(name: str, before: RecordedCheck, after: RecordedCheck) -> Iterator[Seen]:
    """What makes it another check, whatever its verdict is."""
    if after.expected != before.expected:
        yield Seen("expected_otherwise", name, f"{before.expected} -> {after.expected}")
    if after.lane != before.lane:
        yield Seen("lane_changed", name, f"{before.lane} -> {after.lane}")
    for what in ("strategy", "layout", "dtype"):
        texts = getattr(before, what), getattr(after, what)
        if texts[1] != texts[0]:
            yield Seen("compared_less", name, f"{what} {texts[0]} -> {texts[1]}")
    for what in ("ranks", "parameters", "elements"):
        counts = getattr(before, what), getattr(after, what)
        if counts[1] < counts[0]:
            yield Seen("compared_less", name, f"{counts[1]} {what}, and {counts[0]} before")
            return


def _within_the_limit(
    name: str, before: RecordedCheck, after: RecordedCheck, ratios: Mapping[str, float]
) -> Iterator[Seen]:
    for what in ("error", "limit"):
        if getattr(after, what) is None and getattr(before, what) is not None:
            yield Seen("compared_less", name, f"its {what} is not known any more")
    # The rounding of before, so that a larger one now hides no error.
    noise = after.floor if before.floor is None else before.floor
    usual = max(before.error or 0.0, noise or 0.0)
    if after.error is not None and after.error > ratios["error"] * usual:
        text = f"error {_digits(before.error or 0.0)} -> {_digits(after.error)}"
        beside = f"limit {_digits(after.limit or 0.0)}, rounding {_digits(noise or 0.0)}"
        yield Seen("error_grew", name, f"{text}, {beside}{_times(after.error, usual)}")
    limit = before.limit or 0.0
    if after.limit is not None and after.limit > ratios["limit"] * limit:
        text = f"limit {_digits(limit)} -> {_digits(after.limit)}"
        yield Seen("limit_grew", name, f"{text}{_times(after.limit, limit)}")


def _times(value: float, of: float) -> str:
    return f": {text_of(value / of, '.3g')} times as much" if of else ""


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
