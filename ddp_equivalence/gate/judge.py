"""Holds one record against another: what has changed, and whether that is red."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from ddp_equivalence.case.errors import BadCase, Words, one_of
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.gate.finding import (
    KINDS,
    LEVELS,
    Finding,
    Level,
    Seen,
    changed_checks,
    is_worse,
    kind_of,
    name_of_check,
)
from ddp_equivalence.gate.record import OF_SUITE, Recorded, RecordedCheck, RecordedTest
from ddp_equivalence.gate.surroundings import MACHINE
from ddp_equivalence.report.text import plural


@dataclass(frozen=True)
class Judgement:
    """``findings``: the worst first. ``compared``: how many checks both records have."""

    old: Recorded
    new: Recorded
    findings: tuple[Finding, ...]
    compared: int

    def name_of(self, test: str, number: int) -> str:
        """How findings name a check: a test may make several."""
        return name_of_check(self.old, test, number)

    @property
    def level(self) -> Level:
        """The worst of all; "information" if nothing is red or yellow."""
        found = {one.level for one in self.findings}
        return next((one for one in ("red", "yellow") if one in found), "information")

    @property
    def counts(self) -> Counter[Level]:
        """How many findings each level has."""
        return Counter(one.level for one in self.findings)


def judge(
    old: Recorded, new: Recorded, policy: Policy, today: date, earlier: Sequence[Recorded] = ()
) -> Judgement:
    """Hold ``new`` against ``old``. ``earlier``: records that were made before ``old``, the first
    of all first. They show how much errors and times vary, and what was stable.
    """
    usual = with_noise_of(earlier, old)
    found = chain(
        changed_checks(usual, new, policy.ratios),
        changed_tests(usual, new, policy.ratios),
        changed_surroundings(old, new),
        other_checks(old, new),
    )
    seen = with_history(found, earlier, old)
    findings = sorted(policy.judged(seen, today), key=lambda one: LEVELS.index(one.level))
    return Judgement(old, new, tuple(findings), len(old.checks.keys() & new.checks.keys()))


# Which findings are red, yellow, or information: a TOML file that a team keeps with its code.

RATIOS: Mapping[str, float] = {
    "error": 5.0,
    "limit": 2.0,
    "seconds": 3.0,
    "total_seconds": 1.5,
    "memory": 1.5,
}
"""How many times a number must be what it was, to be a finding."""


@dataclass(frozen=True)
class PolicyException:
    """``finding``: a kind, or "*". ``of``: which tests or defaults it is about, where ``*`` stands
    for anything. ``until``: the last day on which it counts.
    """

    number: int
    finding: str
    of: str
    level: Level
    reason: str
    until: date | None = None

    def covers(self, seen: Seen) -> bool:
        """True if it is about this finding."""
        is_kind = self.finding in ("*", seen.kind)
        of = ".*".join(map(re.escape, self.of.split("*")))
        return is_kind and re.fullmatch(of, seen.of, re.DOTALL) is not None


@dataclass(frozen=True)
class Policy:
    """``name``: of the file; "" for none. ``levels``: by kind, of those that the file names."""

    name: str = ""
    levels: Mapping[str, Level] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=lambda: RATIOS)
    exceptions: tuple[PolicyException, ...] = ()

    def judged(self, seen: Iterable[Seen], today: date) -> Iterator[Finding]:
        """The findings with their levels."""
        for exception in self.exceptions:
            if exception.until is not None and exception.until < today:
                text = f"counted until {exception.until}: {exception.reason}"
                expired = Seen("exception_expired", f"exceptions[{exception.number}]", text)
                yield self._judged(expired, today)
        for one in seen:
            yield self._judged(one, today)

    def _judged(self, seen: Seen, today: date) -> Finding:
        for one in self.exceptions:
            counts = one.until is None or one.until >= today
            if counts and one.covers(seen):
                where = f"{self.name}: exceptions[{one.number}]: {one.reason}"
                return Finding(seen, one.level, where)
        if seen.kind in self.levels:
            return Finding(seen, self.levels[seen.kind], f"{self.name}: levels.{seen.kind}")
        return Finding(seen, KINDS[seen.kind].level, f"the default level of {seen.kind}")


def read_policy(path: Path | None) -> Policy:
    """The policy in a file; that of this package for None. Raises BadCase."""
    if path is None:
        return Policy()
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCase("policy", str(path), f"a file that can be read; {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadCase("policy", str(path), f"a file in TOML; {error}") from error
    _require_known("policy", raw, ("levels", "ratios", "exceptions"))
    return Policy(
        path.name,
        _levels(_table(raw, "levels")),
        {**RATIOS, **_ratios(_table(raw, "ratios"))},
        tuple(_exceptions(raw.get("exceptions", []))),
    )


def _table(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = raw.get(name, {})
    if not isinstance(table, dict):
        raise BadCase(name, table, f"a table, [{name}]")
    return table


def _levels(table: Mapping[str, Any]) -> dict[str, Level]:
    _require_known("levels", table, KINDS)
    return {name: _level(f"levels.{name}", value) for name, value in table.items()}


def _level(field_name: str, value: Any) -> Level:
    for level in LEVELS:
        if value == level:
            return level
    raise BadCase(field_name, value, f"one of {', '.join(LEVELS)}")


def _ratios(table: Mapping[str, Any]) -> dict[str, float]:
    _require_known("ratios", table, RATIOS)
    for name, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1 < value < float("inf"):
            raise BadCase(f"ratios.{name}", value, "a number above 1")
    return {name: float(value) for name, value in table.items()}


def _exceptions(entries: Any) -> Iterator[PolicyException]:
    if not isinstance(entries, list):
        raise BadCase("exceptions", entries, "a list of tables, each under [[exceptions]]")
    for number, entry in enumerate(entries, start=1):
        here = f"exceptions[{number}]"
        if not isinstance(entry, dict):
            raise BadCase(here, entry, "a table")
        _require_known(here, entry, ("finding", "of", "level", "reason", "until"))
        if entry.get("finding", "*") not in (*KINDS, "*"):
            wrong = entry["finding"]
            raise BadCase(f"{here}.finding", wrong, f"* or {one_of(KINDS, wrong)}")
        reason, until = entry.get("reason"), entry.get("until")
        if not isinstance(reason, str) or not reason.strip():
            raise BadCase(f"{here}.reason", reason, "a text that says why it is an exception")
        if until is not None and type(until) is not date:
            raise BadCase(f"{here}.until", until, "a day, such as 2027-01-31, without quotes")
        of = entry.get("of")
        if not isinstance(of, str):
            raise BadCase(f"{here}.of", of, "a test or default; * stands for anything")
        level = _level(f"{here}.level", entry.get("level", "information"))
        yield PolicyException(number, entry.get("finding", "*"), of, level, reason, until)


def _require_known(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in table:
        if name not in known:
            raise BadCase(
                where, Words(f"a table with {name!r}"), f"a table with {one_of(known, name)}"
            )


# What has changed around the tests: defaults, packages, variables and the machine.

OF_MACHINE = (*MACHINE, "cores", "driver")
OF_TORCH = ("torch", "python", "cuda", "nccl", "cudnn", "ddp_equivalence")
LONGEST = 60
SAY_NOTHING = ("<object object>", "<factory>")
"""Defaults that only mean that nothing was given."""


def changed_surroundings(old: Recorded, new: Recorded) -> Iterator[Seen]:
    """Compare defaults, packages, variables and machines."""
    yield from _changed_defaults(old, new)
    for name in OF_TORCH:
        yield from _differs("package_changed", name, old.environment, new.environment)
    before, after = _environment_table(old, "packages"), _environment_table(new, "packages")
    for name in sorted({*before, *after} - {"torch", "ddp-equivalence"}):
        yield from _differs("package_changed", name, before, after)
    before, after = _environment_table(old, "variables"), _environment_table(new, "variables")
    for name in sorted({*before, *after}):
        yield from _differs("variable_changed", name, before, after)
    for name in OF_MACHINE:
        yield from _differs("machine_changed", name, old.environment, new.environment)


def other_checks(old: Recorded, new: Recorded) -> Iterator[Seen]:
    """Compare what the records say of themselves: which checks they are of."""
    asked = old.facts.get("asked"), new.facts.get("asked")
    before, after = (one if isinstance(one, dict) else {} for one in asked)
    for name, what in (
        ("files", "the files of your checks"),
        ("selected", "the words of -k"),
        ("paths", "the paths"),
        ("observed", "the observed commands"),
        ("suite", "how much of the suite runs"),
    ):
        if before.get(name) != after.get(name):
            text = _differing(before.get(name), after.get(name)) if name != "files" else "changed"
            yield Seen("other_checks", what, text)
    is_of_suite = "none" not in (before.get("suite"), after.get("suite"))
    if is_of_suite and old.facts.get("source") != new.facts.get("source"):
        yield Seen("other_checks", "the source of ddp_equivalence or its suite", "changed")


def _differing(before: Any, after: Any) -> str:
    return f"{_text(before)} -> {_text(after)}"


def _changed_defaults(old: Recorded, new: Recorded) -> Iterator[Seen]:
    for name in sorted({*old.defaults, *new.defaults}):
        before, after = old.defaults.get(name), new.defaults.get(name)
        if before == after:
            continue
        if before is None or after is None:
            others = new.defaults if after is None else old.defaults
            if any(one.startswith(f"{name[:-1]}.") for one in others):
                text = f"{before or 'an object'} -> {after or 'an object'}"
                yield Seen("default_changed", name, text)
                continue
            if f"{name.partition('(')[0]}({_parameter(name)})" in others:
                continue  # a field of an object; the object itself says it
            function = name.partition("(")[0]
            both = (old.defaults, new.defaults)
            if not all(any(one.startswith(f"{function}(") for one in known) for known in both):
                continue  # the whole function is new, or its package is
            text = f"is {after}, and is new" if before is None else f"was {before}, and is gone"
            yield Seen("default_new", name, text)
        elif before in SAY_NOTHING or after in SAY_NOTHING:
            yield Seen("default_new", name, f"{before} -> {after}, which is replaced inside")
        else:
            yield Seen("default_changed", name, f"{before} -> {after}")


def _parameter(name: str) -> str:
    """``policy`` of ``function(policy.field)``."""
    return name.partition("(")[2].rstrip(")").partition(".")[0]


def _environment_table(record: Recorded, name: str) -> Mapping[str, Any]:
    found = record.environment.get(name)
    return found if isinstance(found, dict) else {}


def _differs(
    kind: str, name: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[Seen]:
    if before.get(name) != after.get(name):
        yield Seen(kind, name, _differing(before.get(name), after.get(name)))


def _text(value: Any) -> str:
    text = "none" if value is None or value == [] else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


# What has changed in whole tests: whether they run, pass, and how long they take.

LEAST_SECONDS = 10.0
"""A test that takes so much longer, and no less, may wait longer. Shorter times are noise: the
first test of a process imports torch, and others wait while the machine starts ranks. Even 10.8 s
instead of 0.1 s was seen once without any change, on a machine that other programs kept busy: only
processor time makes a test red."""

LEAST_CPU_SECONDS = 0.5
"""So much more processor time on each rank is no noise: it does not depend on what else the machine
does. The first test of a rank may need 0.2 s more, for modules that only then are imported."""

LEAST_OF_ALL_SECONDS = 10.0
"""So much longer may take a whole run, which starts ranks and imports torch."""

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
            yield from _changed_test(old, new, name, before, new.tests[name])
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


def _changed_test(
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
            yield Seen("total_slower", new.name, _duration_text(before, after, 1.0, what))


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
            yield name, _duration_text(before, after, usual, what)


def _duration_text(before: float, after: float, usual: float, what: str = "") -> str:
    text = f"{before:.2f} s -> {after:.2f} s{what}"
    beside = f", while the others take {text_of(usual, '.2g')} times as long" if usual > 1 else ""
    return f"{text}: {text_of(after / before, '.2g') if before else 'many'} times as long{beside}"


def _more_memory(old: Recorded, new: Recorded, ratios: Mapping[str, float]) -> Iterator[Seen]:
    before, after = old.peak_mib, new.peak_mib
    if before and after > ratios["memory"] * before:
        yield Seen("memory_grew", new.name, f"{before:.0f} MiB -> {after:.0f} MiB at the peak")


# Several records before the one that is judged: they show what is noise, and what was stable.

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
