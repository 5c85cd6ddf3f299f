"""What is known of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.gate.record_lines import NAME, SCHEMA, read_lines

OF_SUITE = "suite: "
"""What the name of a test of the suite begins with."""

MOST_TEXT, MOST_OF_A_REPORT = 2_000, 10_000
"""Longer texts of a record are cut."""


@dataclass(frozen=True)
class RecordedTest:
    """``outcome``: "passed", "failed", "skipped" or "xfailed", which is a failure that is expected.
    ``reason``: why, if it did not pass. ``starts``: how many sets of ranks it has started.
    ``cpu_seconds``: processor time of the work of its ranks.
    """

    outcome: str
    seconds: float
    reason: str = ""
    starts: int = 0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Details:
    """Of a check that did not come out as its test expects. ``report``: the short one. ``shares``:
    how often each of ``pieces``, such as examples, entered what each of ``ranks`` holds.
    ``parameters``: name, error, rounding floor and limit of each, in the order of backward.
    """

    report: str
    pieces: str
    ranks: tuple[int, ...]
    shares: tuple[tuple[float | None, ...], ...]
    parameters: tuple[tuple[str, float | None, float | None, float | None], ...]


@dataclass(frozen=True)
class RecordedCheck:
    """One check of a test. ``error``, ``floor`` and ``limit``: of the worst parameter, or None.
    ``expected``: the outcome that the test asks for. ``ranks``, ``parameters`` and ``elements``:
    how many were compared. ``digests``: of what each rank held.
    """

    outcome: str
    expected: str
    cause: str
    lane: str
    error: float | None
    floor: float | None
    limit: float | None
    seconds: float
    dtype: str
    ranks: int
    parameters: int
    elements: int
    strategy: str = ""
    layout: str = ""
    known: bool = False
    digests: tuple[str, ...] = ()
    planted: str = ""
    details: Details | None = None


@dataclass
class Recorded:
    """``name``: of the record, for reports. ``facts``: of its first line. ``environment`` and
    ``defaults``: name -> value. ``tests``: id -> test; ``checks``: (id, number) -> check. ``end``:
    of its last line; None if the run was cut off. ``collected``: how many tests pytest was going to
    run; 0 if that is not known. ``exit_codes``: those of pytest. ``peak_mib``: of the largest
    process.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    tests: dict[str, RecordedTest] = field(default_factory=dict)
    checks: dict[tuple[str, int], RecordedCheck] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None
    collected: int = 0
    exit_codes: tuple[int, ...] = ()
    peak_mib: float = 0.0

    @property
    def suite(self) -> str:
        """How much of the suite it is of: "all", "pairwise" or "none"; "" if that is not known."""
        asked = self.facts.get("asked")
        suite = asked.get("suite") if isinstance(asked, dict) else None
        if isinstance(suite, bool):  # of version 1, which knew no selection
            return "all" if suite else "none"
        return suite if isinstance(suite, str) else ""

    def asked_for(self, name: str) -> list[str]:
        """What its first line says that was asked for: "paths", "observed" or "selected"."""
        asked = self.facts.get("asked")
        found = asked.get(name) if isinstance(asked, dict) else None
        texts = found if isinstance(found, list) else [found]
        return [one for one in texts if isinstance(one, str) and one]

    def checks_of(self, test: str) -> Iterator[RecordedCheck]:
        """The checks that one test made."""
        number = 0
        while (check := self.checks.get((test, number))) is not None:
            yield check
            number += 1


def read_record(folder: Path) -> Recorded:
    """Read a record. ``folder``: the one that ``record`` has written, or the file in it.

    Raises BadCase if it is no record, one of a later version, or one that was changed.
    """
    path = folder / NAME if folder.is_dir() else folder
    if not path.is_file():
        raise BadCase("record", str(folder), f"a folder with {NAME}, as `record` writes it")
    found = Recorded(folder.name or str(folder))
    for number, line in enumerate(read_lines(path)):
        if number == 0:
            _require_schema(path, line)
        elif line["kind"] == "record" or found.end is not None:
            raise BadCase("record", str(path), "one record, and nothing after its end")
        try:
            _take(found, line)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            right = f"fields as version {SCHEMA} has them, also in line {number + 1}; {error!r}"
            raise BadCase("record", str(path), right) from error
    if not found.facts:
        raise BadCase("record", str(path), "a record that has begun; this file is empty")
    return found


def _require_schema(path: Path, line: Mapping[str, Any]) -> None:
    schema = line.get("schema")
    if line["kind"] != "record" or not isinstance(schema, int):
        raise BadCase("record", str(path), "a file whose first line says that it is a record")
    if schema > SCHEMA:
        right = f"version {SCHEMA} or earlier: a later ddp_equivalence wrote version {schema}"
        raise BadCase("record", str(path), right)


def _take(found: Recorded, line: Mapping[str, Any]) -> None:
    kind = line["kind"]
    if kind == "record":
        found.facts = line
    elif kind == "environment":
        found.environment = {str(name): value for name, value in line["values"].items()}
    elif kind == "defaults":
        found.defaults = {str(name): _text(value) for name, value in line["values"].items()}
    elif kind == "collected":
        found.collected += _count(line["tests"])
    elif kind == "test":
        reason = _text(line.get("reason", ""))
        seconds, starts = _number(line["seconds"]) or 0.0, _count(line.get("starts", 0))
        cpu = _number(line.get("cpu_seconds")) or 0.0
        test = RecordedTest(_text(line["outcome"]), seconds, reason, starts, cpu)
        found.tests[_text(line["id"])] = test
    elif kind == "check":
        found.checks[_text(line["test"]), _count(line["number"])] = _check(line)
    elif kind == "end":
        found.end = line
        found.exit_codes = tuple(map(_code, line["exit_codes"]))
        found.peak_mib = _number(line.get("peak_mib")) or 0.0


def _check(line: Mapping[str, Any]) -> RecordedCheck:
    return RecordedCheck(
        outcome=_text(line["outcome"]),
        expected=_text(line["expected"]),
        cause=_text(line.get("cause") or ""),
        lane=_text(line["backend"]),
        error=_number(line["error"]),
        floor=_number(line["floor"]),
        limit=_number(line["limit"]),
        seconds=_number(line["seconds"]) or 0.0,
        dtype=_text(line["dtype"]),
        ranks=_count(line["ranks"]),
        parameters=_count(line["parameters"]),
        elements=_count(line["elements"]),
        strategy=_text(line.get("strategy", "")),
        layout=_text(line.get("layout", "")),
        known=line.get("known") is True,
        digests=tuple(map(_text, line.get("digests", ()))),
        planted=_text(line.get("planted", "")),
        details=None if line.get("details") is None else _details(line["details"]),
    )


def _details(raw: Mapping[str, Any]) -> Details:
    shares = raw.get("shares")
    return Details(
        report=_text(raw["report"], MOST_OF_A_REPORT),
        pieces="" if shares is None else _text(shares["pieces"]),
        ranks=() if shares is None else tuple(_count(rank) for rank in shares["ranks"]),
        shares=() if shares is None else tuple(tuple(map(_number, r)) for r in shares["rows"]),
        parameters=tuple(
            (_text(name), _number(error), _number(floor), _number(limit))
            for name, error, floor, limit in raw["parameters"]
        ),
    )


def _text(value: object, most: int = MOST_TEXT) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:60]} is no text")
    return value[:most]


def _code(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{str(value)[:60]} is no exit code")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise TypeError(f"{str(value)[:60]} is no count")
    return value


def _number(value: object) -> float | None:
    """A number that is finite; None for none. Raises ValueError for another value."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:60]} is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number
