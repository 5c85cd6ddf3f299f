"""A recorded run: its lines, each with a hash of all up to it, and what several runs show to be
noise.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.report.text import NotWritten

# What is known of a recorded run.

OF_SUITE = "suite: "
"""The beginning of the name of each test of the suite."""

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
        """The entry of its first line on what was asked for: "paths", "observed" or "selected"."""
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
        raise BadCase("record", str(folder), f"a folder with {NAME} in it, as `record` writes it")
    found = Recorded(folder.name or str(folder))
    for number, line in enumerate(read_lines(path)):
        if number == 0:
            _require_schema(path, line)
        elif line["kind"] == "record" or found.end is not None:
            raise BadCase("record", str(path), f"one record, with nothing after its end; {AGAIN}")
        try:
            _take(found, line)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            is_missing = isinstance(error, KeyError)
            wrong = f"{error} is missing" if is_missing else f"a field is wrong ({error})"
            right = f"one of version {SCHEMA}: in line {number + 1} {wrong}; {AGAIN}"
            raise BadCase("record", str(path), right) from error
    if not found.facts:
        raise BadCase("record", str(path), "one that holds a record; this file is empty")
    return found


def _require_schema(path: Path, line: Mapping[str, Any]) -> None:
    schema = line.get("schema")
    if line["kind"] != "record" or not isinstance(schema, int):
        raise BadCase("record", str(path), "a file whose first line says that it is a record")
    if schema > SCHEMA:
        right = f"of version {SCHEMA} or earlier: a later ddp_equivalence wrote version {schema}"
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
        found.tests[_text(line["id"])] = RecordedTest(**_fields(RecordedTest, line))
    elif kind == "check":
        renamed = {**line, "lane": line["backend"], "cause": line.get("cause") or ""}
        check = RecordedCheck(**_fields(RecordedCheck, renamed))
        found.checks[_text(line["test"]), _count(line["number"])] = check
    elif kind == "end":
        found.end = line
        found.exit_codes = tuple(map(_code, line["exit_codes"]))
        found.peak_mib = _number(line.get("peak_mib")) or 0.0


def _fields(kind: type[RecordedTest] | type[RecordedCheck], line: Mapping[str, Any]) -> Any:
    """The fields of an object of this kind; those that a line lacks have their defaults."""
    return {
        one.name: READERS[str(one.type)](line[one.name])
        for one in fields(kind)
        if one.name in line or one.default is MISSING
    }


def _details(raw: Mapping[str, Any] | None) -> Details | None:
    if raw is None:
        return None
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


READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": _text,
    "int": _count,
    "float": lambda value: _number(value) or 0.0,
    "float | None": _number,
    "bool": lambda value: value is True,
    "tuple[str, ...]": lambda values: tuple(map(_text, values)),
    "Details | None": _details,
}
"""By the type of a field, what reads its value and raises an error for one of another type."""


# A record is a file of JSON lines. Each line carries a hash of all lines up to it.
#
# A run that is killed at any moment leaves whole lines, and at most one that is not. Whoever
# changes, drops or adds a line by hand breaks the hashes: they show mistakes, and are no
# signature.

SCHEMA = 2
"""The version of this format. It grows by one when a field changes its meaning or goes."""

NAME, AGAIN = "record.jsonl", "record it again"
"""The name of the file in the folder of a record, and what to do about one that cannot be read."""

CANNOT_WRITE = 74
"""Pytest's exit code where it could not write to a record."""

LONGEST_LINE = 1 << 20
LARGEST_FILE = 256 << 20
HASH = "so_far"
DIGITS = 16


class RecordWriter:
    """Adds lines to the file at ``path``, which other processes may have begun."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = ""
        if path.exists():
            length = 0
            for line, end in _lines_and_ends(path):
                self._hash, length = line[HASH], end
            os.truncate(path, length)  # without a line that was cut off

    def write(self, kind: str, **fields: Any) -> None:
        """Add one line, of which a reader sees all or nothing. Raises NotWritten."""
        line = {"kind": kind, **fields}
        self._hash = line[HASH] = _hash_of(line, self._hash)
        text = json.dumps(line, allow_nan=False, ensure_ascii=True).encode() + b"\n"
        end = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("ab", buffering=0) as file:
                if file.write(text) < len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                os.truncate(self._path, end)
            raise NotWritten(error.errno, error.strerror, str(self._path)) from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record, one after the other. A last line that was cut off is left out.

    Raises BadCase if the file is none that this package has written, or was changed afterwards.
    """
    for line, _ in _lines_and_ends(path):
        yield line


def _lines_and_ends(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each line, and the place in the file where it ends."""
    if path.stat().st_size > LARGEST_FILE:
        _refuse(path, f"a record of at most {LARGEST_FILE >> 20} MiB")
    known, number = "", 0
    with path.open("rb") as file:
        while text := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(text) > LONGEST_LINE:
                _refuse(
                    path,
                    f"made of lines of at most {LONGEST_LINE >> 10} KiB; line {number} is longer",
                )
            if not text.endswith(b"\n"):
                return  # the run was killed while it wrote this line
            line = _parsed(path, number, text)
            if line.get(HASH) != _hash_of(line, known):
                right = f"as it was written: line {number} or one before it was changed; {AGAIN}"
                _refuse(path, right)
            known = line[HASH]
            yield line, file.tell()


def _parsed(path: Path, number: int, text: bytes) -> dict[str, Any]:
    right = f"a file with an object of JSON in each line; line {number} is none"
    try:
        line = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"{right}: {str(error)[:80]}")
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        _refuse(path, right)
    return line


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _hash_of(line: Mapping[str, Any], before: str) -> str:
    fields = {name: value for name, value in line.items() if name != HASH}
    text = json.dumps(fields, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(f"{before}{text}".encode()).hexdigest()[:DIGITS]


def _refuse(path: Path, right: str) -> NoReturn:
    raise BadCase("record", str(path), right)


def standard_name(name: str) -> str:
    """``Small_Package[extra]`` is "small-package". Source: PEP 503."""
    return re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower()
