"""What the gate found, as a report of about one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_equivalence.gate.finding import KINDS, LEVELS, Finding, Level
from ddp_equivalence.gate.judge import Judgement
from ddp_equivalence.gate.recorded import Recorded
from ddp_equivalence.report.line import Line, Style
from ddp_equivalence.report.wrapping import plural

MOST_OF_A_KIND: Mapping[Level, int] = {"red": 8, "yellow": 4, "information": 2, "ignored": 0}
STYLES: Mapping[Level, Style] = {
    "red": Style.BAD,
    "yellow": Style.UNCERTAIN,
    "information": Style.PLAIN,
    "ignored": Style.PLAIN,
}
FIRST = ("torch", "nccl", "cuda", "python")
"""The versions that the first line names first."""


def report(judgement: Judgement, full: bool = False) -> Iterator[Line]:
    """The report, line by line. ``full``: with every finding. What a terminal would obey, such as
    an escape sequence in the name of a test, is shown as "?".
    """
    for line in _lines(judgement, full):
        yield replace(line, text=printable(line.text))


def printable(text: str) -> str:
    """The text, with "?" for every character that is no visible one."""
    return "".join(one if one.isprintable() else "?" for one in text)


def colour_of(judgement: Judgement) -> str:
    """Red, yellow or green."""
    return "green" if judgement.level == "information" else judgement.level


def title(judgement: Judgement) -> str:
    """The first line of a report."""
    old, new = judgement.old, judgement.new
    return f"{colour_of(judgement)}: {old.name} -> {new.name}{_versions(old, new)}"


def _lines(judgement: Judgement, full: bool) -> Iterator[Line]:
    level = judgement.level
    yield Line(title(judgement), Style.GOOD if level == "information" else STYLES[level])
    for one in LEVELS:
        chosen = [finding for finding in judgement.findings if finding.level == one]
        for kind in KINDS:
            of_kind = [finding for finding in chosen if finding.seen.kind == kind]
            if of_kind:
                yield from _of_kind(one, of_kind, full)
    yield Line("")
    yield from _counts(judgement)


def _versions(old: Recorded, new: Recorded) -> str:
    """The packages whose versions differ, the most important first."""
    before, after = _packages(old), _packages(new)
    names = [*FIRST, *sorted({*before, *after} - {*FIRST})]
    changed = [
        f"{name} {before.get(name) or 'none'} -> {after.get(name) or 'none'}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f" ({', '.join(changed[:3])}{more})" if changed else " (the same packages)"


def _packages(record: Recorded) -> dict[str, Any]:
    packages = record.environment.get("packages")
    known = {**packages} if isinstance(packages, dict) else {}
    return {**known, **{name: record.environment.get(name) for name in FIRST}}


def _of_kind(level: Level, findings: Sequence[Finding], full: bool) -> Iterator[Line]:
    kind = findings[0].seen.kind
    yield Line("")
    head = f"{level.upper()}  {kind}: {len(findings)}"
    yield Line(f"{head}   {KINDS[kind].meaning}", STYLES[level], len(head))
    shown = findings if full else findings[: MOST_OF_A_KIND[level]]
    for one in shown:
        yield Line(f"  {one.seen.of}")
        yield Line(f"      {one.seen.text}")
    if len(shown) < len(findings):
        yield Line(f"  ... and {len(findings) - len(shown)} more (--full)")
    for decided_by in dict.fromkeys(one.decided_by for one in findings):
        yield Line(f"  decided by {decided_by}")


def _counts(judgement: Judgement) -> Iterator[Line]:
    old, new, counts = judgement.old, judgement.new, judgement.counts
    yield Line(
        f"{judgement.compared} {plural(judgement.compared, 'check')} in both records; "
        f"{len(old.tests)} {plural(len(old.tests), 'test')} before, {len(new.tests)} now; "
        f"{counts['red']} red, {counts['yellow']} yellow, {counts['information']} information, "
        f"{counts['ignored']} ignored"
    )
