"""Which findings are red, yellow, or information: a TOML file that a team keeps with its code."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.gate.finding import KINDS, LEVELS, Finding, Level, Seen

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
        raise BadCase("exceptions", entries, "tables, each under [[exceptions]]")
    for number, entry in enumerate(entries, start=1):
        here = f"exceptions[{number}]"
        if not isinstance(entry, dict):
            raise BadCase(here, entry, "a table")
        _require_known(here, entry, ("finding", "of", "level", "reason", "until"))
        if entry.get("finding", "*") not in (*KINDS, "*"):
            raise BadCase(f"{here}.finding", entry["finding"], f"* or one of {', '.join(KINDS)}")
        reason, until = entry.get("reason"), entry.get("until")
        if not isinstance(reason, str) or not reason.strip():
            raise BadCase(f"{here}.reason", reason, "why it is an exception, in words")
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
            raise BadCase(where, name, f"only these names: {', '.join(known)}")
