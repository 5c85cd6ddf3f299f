"""A record is a file of JSON lines. Each line carries a hash of all lines up to it.

A run that is killed at any moment leaves whole lines, and at most one that is not. Whoever changes,
drops or adds a line by hand breaks the hashes: they show mistakes, and are no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ddp_equivalence.case.errors import BadCase

SCHEMA = 2
"""The version of this format. It grows by one when a field changes its meaning or goes."""

NAME = "record.jsonl"
"""The name of the file in the folder of a record."""

LONGEST_LINE = 1 << 20
LARGEST_FILE = 256 << 20
DEEPEST = 12
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
        """Add one line, of which a reader sees all or nothing."""
        line = {"kind": kind, **fields}
        self._hash = line[HASH] = _hash_of(line, self._hash)
        text = json.dumps(line, allow_nan=False, ensure_ascii=True)
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"{text}\n")


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
                _refuse(path, f"lines of at most {LONGEST_LINE >> 10} KiB, also line {number}")
            if not text.endswith(b"\n"):
                return  # the run was killed while it wrote this line
            line = _parsed(path, number, text)
            if line.get(HASH) != _hash_of(line, known):
                right = f"lines as they were written: line {number} or one before it was changed"
                _refuse(path, right)
            known = line[HASH]
            yield line, file.tell()


def _parsed(path: Path, number: int, text: bytes) -> dict[str, Any]:
    right = f"JSON with an object in each line, also in line {number}"
    try:
        line = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"{right}; {str(error)[:80]}")
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        _refuse(path, right)
    if _depth(line) > DEEPEST:
        _refuse(path, f"values in at most {DEEPEST} others, also in line {number}")
    return line


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level and deepest <= DEEPEST:
        deepest += 1
        inside: list[Any] = []
        for one in level:
            inside += one.values() if isinstance(one, dict) else ()
            inside += one if isinstance(one, list) else ()
        level = inside
    return deepest


def _hash_of(line: Mapping[str, Any], before: str) -> str:
    fields = {name: value for name, value in line.items() if name != HASH}
    text = json.dumps(fields, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(f"{before}{text}".encode()).hexdigest()[:DIGITS]


def _refuse(path: Path, right: str) -> NoReturn:
    raise BadCase("record", str(path), right)
