"""A page about one or several records: one file, which needs no network."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.gate.judge import Judgement, Policy, judge
from ddp_equivalence.gate.outputs import colour_of, printable, title
from ddp_equivalence.gate.record import Recorded, RecordedCheck
from ddp_equivalence.report.text import write_file

MOST_FAILING = 50
"""So many checks that are not as expected are shown whole."""

WIDEST_SHARES = 256
"""So many examples are shown of each rank."""

FIRST_DECADE, LAST_DECADE = -17, 1
"""The powers of ten that the scale of errors begins and ends with."""


def write_page(
    records: Sequence[Recorded], policy: Policy, today: datetime.date, path: Path
) -> None:
    """Write the page. ``records``: the oldest first; each is held against the one before."""
    environment = Environment(
        loader=PackageLoader("ddp_equivalence.gate", "template"),
        autoescape=True,  # names are those of users
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = lambda value: printable(str(value))
    template = environment.get_template("page.html")
    judgements = [judge(old, new, policy, today) for old, new in pairwise(records)]
    last = records[-1]
    text = template.render(
        title=f"{last.name}: data-parallel training and one big batch",
        records=[_column(record) for record in records],
        judgements=[_judgement(one) for one in judgements],
        table=_table(last),
        failing=list(_failing(last)),
        rows=list(_rows(records)),
        made=today.isoformat(),
    )
    write_file(path, text)


def _column(record: Recorded) -> dict[str, Any]:
    """The heading above a record."""
    own = [one for one in record.checks.values() if not one.planted]
    planted = [one for one in record.checks.values() if one.planted]
    tests = Counter(test.outcome for test in record.tests.values())
    facts = record.environment
    return {
        "name": record.name,
        "created": str(record.facts.get("created", "unknown"))[:19],
        "torch": facts.get("torch", "unknown"),
        "machine": ", ".join(map(str, facts.get("gpus") or [facts.get("processor", "unknown")])),
        "commit": str(facts.get("commit") or "none")[:13],
        "complete": record.end is not None,
        "as_expected": sum(one.outcome == one.expected for one in own),
        "otherwise": sum(one.outcome != one.expected for one in own),
        "known": sum(one.known for one in own),
        "planted": len(planted),
        "caught": sum(one.outcome == "different" for one in planted),
        **{name: tests[name] for name in ("passed", "failed", "skipped")},
        "seconds": record.end.get("seconds") if record.end else None,
    }


def _judgement(judgement: Judgement) -> dict[str, Any]:
    return {
        "title": title(judgement),
        "colour": colour_of(judgement),
        "findings": judgement.findings,
        "compared": judgement.compared,
    }


def _table(record: Recorded) -> dict[str, Any]:
    """How many checks of each strategy came out as expected, by layout."""
    counts: Counter[tuple[str, str]] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    for check in record.checks.values():
        if check.planted or check.known or check.outcome not in ("same", "different"):
            continue
        counts[check.strategy, check.layout] += 1
        wrong[check.strategy, check.layout] += check.outcome != check.expected
    layouts = sorted({layout for _, layout in counts}, key=_size)
    strategies = sorted({strategy for strategy, _ in counts})
    cells = [
        [(counts[strategy, layout], wrong[strategy, layout]) for layout in layouts]
        for strategy in strategies
    ]
    return {"layouts": layouts, "rows": list(zip(strategies, cells, strict=True))}


def _size(layout: str) -> tuple[int, str]:
    try:
        return parse(layout).world_size, layout
    except BadCase:
        return 0, layout


def _failing(record: Recorded) -> Iterator[dict[str, Any]]:
    """The checks that did not come out as expected."""
    chosen = (
        (test, check)
        for (test, _), check in record.checks.items()
        if check.outcome != check.expected and not check.planted
    )
    for test, check in list(chosen)[:MOST_FAILING]:
        details = check.details
        yield {
            "name": test,
            "outcome": check.outcome,
            "cause": check.cause,
            "report": "" if details is None else details.report,
            "pieces": "" if details is None else details.pieces,
            "shares": [] if details is None else list(_heat(check)),
            "parameters": [] if details is None else list(_bars(check)),
        }


@dataclass(frozen=True)
class _Cell:
    """``hue``: of a share that is too large or too small. ``strength``: from 0 to 100."""

    text: str
    hue: int
    strength: int


def _heat(check: RecordedCheck) -> Iterator[tuple[int, list[_Cell]]]:
    assert check.details is not None
    for rank, row in zip(check.details.ranks, check.details.shares, strict=False):
        yield rank, [_cell(share) for share in row[:WIDEST_SHARES]]


def _cell(share: float | None) -> _Cell:
    if share is None:
        return _Cell("?", 0, 0)
    away = share - 1
    return _Cell(f"{share:.2f}", 20 if away > 0 else 220, min(100, round(60 * abs(away))))


def _bars(check: RecordedCheck) -> Iterator[dict[str, Any]]:
    """Error, floor and limit of each parameter, on a scale of powers of ten from 0 to 100."""
    assert check.details is not None
    for name, error, floor, limit in check.details.parameters:
        numbers = {"error": error, "floor": floor, "limit": limit}
        yield {
            "name": name,
            "beyond": error is None or (limit is not None and error > limit),
            **{key: _digits(value) for key, value in numbers.items()},
            **{f"{key}_at": _at(value) for key, value in numbers.items()},
        }


def _digits(value: float | None) -> str:
    return "not finite" if value is None else text_of(value, ".2g")


def _at(value: float | None) -> float:
    if value is None:
        return 100.0
    if value <= 0:
        return 0.0
    part = (math.log10(value) - FIRST_DECADE) / (LAST_DECADE - FIRST_DECADE)
    return round(100 * min(1.0, max(0.0, part)), 1)


def _rows(records: Sequence[Recorded]) -> Iterator[dict[str, Any]]:
    """Every test of every record, with what it did in each."""
    names = dict.fromkeys(name for record in records for name in record.tests)
    for name in names:
        cells = [_did(record, name) for record in records]
        yield {"name": name, "cells": cells, "changed": len(set(cells)) > 1}


def _did(record: Recorded, name: str) -> str:
    test = record.tests.get(name)
    if test is None:
        return "not there"
    checks = list(record.checks_of(name))
    if test.outcome == "skipped" or not checks:
        return test.outcome
    verdicts = dict.fromkeys(
        f"{one.outcome} [{one.cause}]" if one.cause else one.outcome for one in checks
    )
    failed = "" if test.outcome == "passed" else " (failed)"
    return ", ".join(verdicts) + failed
