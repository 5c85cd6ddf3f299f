"""Several records before the one that is judged: they show what is noise, and what was stable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddp_equivalence.gate.finding import Seen
from ddp_equivalence.gate.recorded import Recorded, RecordedCheck, RecordedTest
from ddp_equivalence.gate.rules_of_checks import kind_of, name_of_check
from ddp_equivalence.report.wrapping import plural

OF_A_CHECK = ("verdict_worse", "verdict_better", "cause_changed")
OF_A_TEST = ("test_failed", "test_passes")
"""The findings that say what the records before have shown of the same check or test."""


def with_noise_of(earlier: Sequence[Recorded], last: Recorded) -> Recorded:
    """The last record, with the largest error, rounding floor, time and memory that any record has
    of the same check or test: what was as large before is no finding. Limits stay those of the last
    record, because another limit is no noise.
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
    alike = [one for one in before if kind_of(one) == kind_of(check)]
    errors = [one.error for one in (*alike, check) if one.error is not None]
    floors = [one.floor for one in (*alike, check) if one.floor is not None]
    return replace(
        check,
        error=None if check.error is None else max(errors),
        floor=None if check.floor is None else max(floors),
    )


def _slowest(test: RecordedTest, before: Sequence[RecordedTest]) -> RecordedTest:
    alike = [one for one in before if (one.outcome, one.starts) == (test.outcome, test.starts)]
    return replace(
        test,
        seconds=max(one.seconds for one in (*alike, test)),
        cpu_seconds=max(one.cpu_seconds for one in (*alike, test)),
    )


def with_history(
    seen: Iterator[Seen], earlier: Sequence[Recorded], last: Recorded
) -> Iterator[Seen]:
    """The findings; those about one test say what the records before the last have shown of it."""
    of_checks = [_outcomes_of_checks(one, last) for one in earlier]
    of_tests = [{name: test.outcome for name, test in one.tests.items()} for one in earlier]
    known = {**dict.fromkeys(OF_A_CHECK, of_checks), **dict.fromkeys(OF_A_TEST, of_tests)}
    for one in seen:
        outcomes = known.get(one.kind, ())
        counts = Counter(of_record[one.of] for of_record in outcomes if one.of in of_record)
        if counts:
            said = ", ".join(
                f"{outcome} {count} {plural(count, 'time')}" for outcome, count in counts.items()
            )
            yield replace(one, text=f"{one.text}; before that {said}")
        else:
            yield one


def _outcomes_of_checks(record: Recorded, last: Recorded) -> dict[str, str]:
    """The name that a finding has -> the outcome."""
    return {
        name_of_check(last, test, number): check.outcome
        for (test, number), check in record.checks.items()
    }
