"""Several records before the one that is judged: they show what is noise, and what was stable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddp_equivalence.gate.finding import Seen
from ddp_equivalence.gate.recorded import Recorded, RecordedCheck, RecordedTest
from ddp_equivalence.gate.rules_of_checks import name_of_check
from ddp_equivalence.report.wrapping import plural

OF_ONE_TEST = ("verdict_worse", "verdict_better", "cause_changed", "test_failed", "test_passes")
"""The findings that say what the records before have shown of the same test or check."""


def with_noise_of(earlier: Sequence[Recorded], last: Recorded) -> Recorded:
    """The last record, with the largest error, rounding floor, limit and time that any of them has:
    what was there before and was right is no finding when it comes again. A limit is that of the
    last record, because another one is no noise.
    """
    if not earlier:
        return last
    checks = {
        key: _usual(check, [one.checks[key] for one in earlier if key in one.checks])
        for key, check in last.checks.items()
    }
    tests = {
        name: _slowest(test, [one.tests[name] for one in earlier if name in one.tests])
        for name, test in last.tests.items()
    }
    peak = max(one.peak_mib for one in (*earlier, last))
    return replace(last, checks=checks, tests=tests, peak_mib=peak)


def _usual(check: RecordedCheck, before: Sequence[RecordedCheck]) -> RecordedCheck:
    alike = [one for one in before if one.outcome == check.outcome]
    errors = [one.error for one in (*alike, check) if one.error is not None]
    floors = [one.floor for one in (*alike, check) if one.floor is not None]
    return replace(
        check,
        error=None if check.error is None else max(errors),
        floor=None if check.floor is None else max(floors),
    )


def _slowest(test: RecordedTest, before: Sequence[RecordedTest]) -> RecordedTest:
    alike = [one for one in before if one.starts == test.starts]
    return replace(
        test,
        seconds=max(one.seconds for one in (*alike, test)),
        cpu_seconds=max(one.cpu_seconds for one in (*alike, test)),
    )


def with_history(
    seen: Iterator[Seen], earlier: Sequence[Recorded], last: Recorded
) -> Iterator[Seen]:
    """The findings; those about one test say what the records before the last have shown of it."""
    outcomes = [_outcomes(one, last) for one in earlier]
    for one in seen:
        counts = Counter(of_record[one.of] for of_record in outcomes if one.of in of_record)
        if one.kind in OF_ONE_TEST and counts:
            said = ", ".join(
                f"{outcome} {count} {plural(count, 'time')}" for outcome, count in counts.items()
            )
            yield replace(one, text=f"{one.text}; before that {said}")
        else:
            yield one


def _outcomes(record: Recorded, last: Recorded) -> dict[str, str]:
    """What findings name -> its outcome."""
    of_checks = {
        name_of_check(last, test, number): check.outcome
        for (test, number), check in record.checks.items()
    }
    return {**{name: test.outcome for name, test in record.tests.items()}, **of_checks}
