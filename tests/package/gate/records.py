"""Records that these tests make, with and without a change."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from ddp_equivalence import gate
from ddp_equivalence.gate.judge import Judgement, Policy, judge
from ddp_equivalence.gate.record import (
    NAME,
    SCHEMA,
    Recorded,
    RecordWriter,
    read_lines,
    read_record,
)

TODAY = datetime.date(2026, 11, 26)
"""The day on which these tests judge."""

DEFAULTS = {"torch.nn.parallel.DistributedDataParallel(bucket_cap_mb)": "None"}

ENVIRONMENT: Mapping[str, Any] = {
    "torch": "2.12.1",
    "python": "3.11.7",
    "processor": "A processor",
    "vectors": "AVX512",
    "machine": "Linux x86_64",
    "gpus": [],
    "cores": 2,
    "variables": {},
    "packages": {"torch": "2.12.1", "numpy": "2.4.0"},
}

CHECK: Mapping[str, Any] = {
    "strategy": "ddp_mean",
    "layout": "1x2",
    "backend": "gloo",
    "dtype": "float64",
    "expected": "same",
    "outcome": "same",
    "cause": None,
    "causes": [],
    "error": 2e-16,
    "floor": 3e-16,
    "limit": 5.7e-14,
    "seconds": 0.1,
    "reason": "",
    "parameters": 4,
    "elements": 100,
    "ranks": 2,
    "planted": "",
    "known": False,
    "gpu": "",
    "digests": ["a1", "b2"],
}

MINE = "mine.py"
TESTS = ("suite: test_a", "suite: test_b", MINE)


def write(
    folder: Path,
    *,
    tests: Mapping[str, Mapping[str, Any] | None] | None = None,
    checks: Mapping[str, Mapping[str, Any]] | None = None,
    defaults: Mapping[str, str] | None = None,
    environment: Mapping[str, Any] | None = None,
    schema: int = SCHEMA,
    ends: bool = True,
    peak_mib: float = 400.0,
    exit_code: int = 0,
    collected: int = 0,
    asked: Mapping[str, Any] | None = None,
    without_checks: Sequence[str] = (),
) -> Path:
    """Write a record. ``tests`` and ``checks``: changed fields by test; None for one that is gone.
    ``defaults`` and ``environment``: changed values.
    """
    folder.mkdir()
    writer = RecordWriter(folder / NAME)
    of_all = {"suite": "all", "files": "e5", "selected": "", "paths": ["mine.py"], "observed": []}
    facts = {"created": "2026-11-26T10:00:00+00:00", "source": "c3"}
    writer.write("record", schema=schema, asked={**of_all, **(asked or {})}, **facts)
    writer.write("environment", values={**ENVIRONMENT, **(environment or {})})
    writer.write("defaults", values={**DEFAULTS, **(defaults or {})})
    if collected:
        writer.write("collected", tests=collected)
    for name in dict.fromkeys([*TESTS, *(tests or {})]):
        changed = (tests or {}).get(name, {})
        if changed is None:
            continue
        writer.write("test", **{"id": name, "outcome": "passed", "seconds": 0.2, **changed})
        if changed.get("outcome") not in ("skipped", "xfailed") and name not in without_checks:
            fields = {**CHECK, **(checks or {}).get(name, {})}
            writer.write("check", test=name, number=0, **fields)
    if ends:
        writer.write("end", exit_codes=[exit_code], seconds=3.0, peak_mib=peak_mib)
    return folder


def judged(old: Path, new: Path, policy: Policy | None = None) -> Judgement:
    """The judgement on two records."""
    return judge(read_record(old), read_record(new), policy or Policy(), TODAY)


def found(judgement: Judgement) -> list[tuple[str, str, str]]:
    """(level, kind, of) of each finding."""
    return [(one.level, one.seen.kind, one.seen.of) for one in judgement.findings]


def read(folder: Path) -> Recorded:
    """The record in a folder."""
    return read_record(folder)


def lines_of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind of the record in a folder."""
    return [line for line in read_lines(folder / NAME) if line["kind"] == kind]


@cache
def schema() -> Any:
    """The published schema of a line of a record."""
    return json.loads(Path(gate.__file__).with_name("record.schema.json").read_text())


def validate(line: dict[str, Any]) -> None:
    """Raises ValidationError if the line is not as the schema says."""
    Draft202012Validator(schema()).validate(line)
