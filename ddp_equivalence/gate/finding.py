"""A thing that is not as it was, and how much it matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.gate.record import Recorded, RecordedCheck, RecordedTest
from ddp_equivalence.report.text import plural

Level = Literal["red", "yellow", "information", "ignored"]
LEVELS: tuple[Level, ...] = ("red", "yellow", "information", "ignored")


@dataclass(frozen=True)
class Kind:
    """A kind of finding. ``level``: the one that it has unless a policy says otherwise.
    ``meaning``: a sentence for those who read it for the first time.
    """

    level: Level
    meaning: str


KINDS: Mapping[str, Kind] = {
    "verdict_worse": Kind("red", "A check that was right is not, or cannot be judged any more."),
    "test_failed": Kind("red", "A test that passed fails."),
    "stopped_running": Kind("red", "A test that ran is skipped: nothing is known of it now."),
    "vanished": Kind("red", "A test or a check is not there any more."),
    "expected_otherwise": Kind("red", "The test of a check asks for another outcome than before."),
    "compared_less": Kind("red", "A check compares less than before, or something else."),
    "lane_changed": Kind("red", "A check ran on another backend or kind of device."),
    "incomplete": Kind("red", "A run was cut off, so that the rest of it is not known."),
    "nothing_compared": Kind("red", "A run compared nothing."),
    "error_grew": Kind("red", "An error is within its limit, and was much smaller before."),
    "limit_grew": Kind("red", "A check allows much more error than before."),
    "default_changed": Kind("red", "Scripts that do not set this default train otherwise now."),
    "slower": Kind("red", "A test needs much more processor time, beside what the others need."),
    "appeared_failing": Kind("yellow", "A test or a check is new, and is not right."),
    "failure_changed": Kind("yellow", "A test still does not pass, for another reason."),
    "other_checks": Kind("yellow", "The two records are not of the same checks."),
    "cause_changed": Kind("yellow", "What was different still is, with another cause."),
    "waits_longer": Kind("yellow", "A test takes much longer without working more: it waits."),
    "total_slower": Kind("yellow", "The whole run takes longer."),
    "memory_grew": Kind("yellow", "The largest process needs more memory."),
    "variable_changed": Kind("yellow", "A variable of NCCL, CUDA or torch is another one."),
    "exception_expired": Kind("yellow", "An exception of the policy does not count any more."),
    "verdict_better": Kind("information", "What was wrong is right."),
    "test_passes": Kind("information", "A test that failed or was skipped passes."),
    "appeared": Kind("information", "A test or a check is new."),
    "default_new": Kind("information", "A default is there that was not, or the other way round."),
    "digest_changed": Kind("information", "Gradients differ in their last digits, and are right."),
    "machine_changed": Kind("information", "Another machine may round otherwise."),
    "package_changed": Kind("information", "A package has another version."),
}
"""All kinds by name, the worst first."""


@dataclass(frozen=True)
class Seen:
    """A finding before it is judged. ``of``: the test, check, default or package. ``text``: what
    has changed, and by how much.
    """

    kind: str
    of: str
    text: str


@dataclass(frozen=True)
class Finding:
    """``decided_by``: the line of the policy, or the default level of its kind."""

    seen: Seen
    level: Level
    decided_by: str


# What has changed in the verdicts, errors, limits and bits of single checks.

GOOD = "same"


def changed_checks(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    """Compare the checks that both have made, and say which one has not."""
    gone: list[tuple[str, RecordedCheck]] = []
    added: list[tuple[str, RecordedCheck]] = []
    for (test, number), before in old.checks.items():
        name = name_of_check(old, test, number)
        after = new.checks.get((test, number))
        if after is not None:
            yield from _changed_check(name, before, after, ratios)
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
    """The key that two checks share if they compare the same, with the same verdict."""
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


def _changed_check(
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
    """The key that tells checks apart, whatever their verdicts are."""
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
        yield Seen("error_grew", name, f"{text}, {beside}{_ratio_text(after.error, usual)}")
    limit = before.limit or 0.0
    if after.limit is not None and after.limit > ratios["limit"] * limit:
        text = f"limit {_digits(limit)} -> {_digits(after.limit)}"
        yield Seen("limit_grew", name, f"{text}{_ratio_text(after.limit, limit)}")


def _ratio_text(value: float, of: float) -> str:
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
