"""The findings of the gate as text, and as the files that other programs read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ddp_equivalence.gate.finding import KINDS, LEVELS, Finding, Level
from ddp_equivalence.gate.judge import Judgement
from ddp_equivalence.gate.record import Recorded
from ddp_equivalence.report.text import Line, Style, annotation, plural, write_file

# What the gate found, for other programs: GitHub and GitLab, JUnit readers, and JSON.

MOST_ROWS = 50
"""So many findings of each level stand in a comment; GitHub takes 65,536 characters."""


def write_markdown(judgement: Judgement, path: Path) -> None:
    """A comment for a pull request, or a step summary of GitHub Actions. It is added to the file,
    since GitHub gives a file that other steps have written to.
    """
    before = path.read_bytes().decode() if path.is_file() else ""
    write_file(path, before + "\n".join(_markdown(judgement)) + "\n")


def _markdown(judgement: Judgement) -> Iterator[str]:
    sign = {"red": "\U0001f534", "yellow": "\U0001f7e1"}.get(judgement.level, "\U0001f7e2")
    yield f"### {sign} {_cell(title(judgement))}"
    yield ""
    for level in ("red", "yellow", "information"):
        found = [one for one in judgement.findings if one.level == level]
        if not found:
            continue
        if level == "information":
            yield f"<details><summary>{len(found)} for information</summary>"
            yield ""
        yield "| | finding | of | what has changed | decided by |"
        yield "| --- | --- | --- | --- | --- |"
        for one in found[:MOST_ROWS]:
            cells = (level, one.seen.kind, one.seen.of, one.seen.text, one.decided_by)
            yield f"| {' | '.join(map(_cell, cells))} |"
        if len(found) > MOST_ROWS:
            yield f"| | | | {len(found) - MOST_ROWS} more | |"
        if level == "information":
            yield ""
            yield "</details>"
        yield ""
    yield f"{judgement.compared} checks are in both records."


def _cell(text: str) -> str:
    """The text as it is, whatever it holds: names of tests are those of users."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_[]|@#":
        escaped = escaped.replace(sign, f"&#{ord(sign)};" if sign in "@#|" else f"\\{sign}")
    return escaped


def github_annotations(judgement: Judgement) -> Iterator[str]:
    """A line for GitHub Actions for every finding that is red."""
    for one in _reds(judgement):
        message = f"{printable(one.seen.of)}\n{printable(one.seen.text)}\n{one.decided_by}"
        yield annotation("", 0, f"{one.seen.kind}: {KINDS[one.seen.kind].meaning}", message)


def _reds(judgement: Judgement) -> list[Finding]:
    return [one for one in judgement.findings if one.level == "red"]


def write_junit(judgement: Judgement, path: Path) -> None:
    """JUnit XML, as GitLab, Jenkins and others read it: a test case for each check of both records,
    with its numbers as properties, and one for each finding that is about no check.
    """
    new, reds = judgement.new, _reds(judgement)
    by_name: dict[str, list[Finding]] = {}
    for one in reds:
        by_name.setdefault(one.seen.of, []).append(one)
    suite = ElementTree.Element("testsuite", name=printable(title(judgement)))
    for (test, number), check in new.checks.items():
        name = judgement.name_of(test, number)
        case = _case(suite, name, by_name.pop(name, []), check.seconds)
        properties = ElementTree.SubElement(case, "properties")
        facts = {
            **{"outcome": check.outcome, "cause": check.cause, "lane": check.lane},
            **{"error": check.error, "floor": check.floor, "limit": check.limit},
        }
        for key, value in facts.items():
            if value not in (None, ""):
                ElementTree.SubElement(properties, "property", name=key, value=str(value))
    for name, findings in by_name.items():
        _case(suite, name, findings, 0.0)
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in suite)))
    write_file(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _case(
    suite: ElementTree.Element, name: str, findings: Sequence[Finding], seconds: float
) -> ElementTree.Element:
    case = ElementTree.SubElement(
        suite, "testcase", classname="gate", name=printable(name), time=f"{seconds:.3f}"
    )
    if findings:
        kinds = ", ".join(dict.fromkeys(one.seen.kind for one in findings))
        failure = ElementTree.SubElement(case, "failure", message=kinds, type=findings[0].seen.kind)
        texts = (f"{printable(one.seen.text)} ({one.decided_by})" for one in findings)
        failure.text = "\n".join(texts)
    return case


def write_json(judgement: Judgement, path: Path) -> None:
    """All findings, for another program."""
    write_file(path, json.dumps(as_json(judgement), indent=1, allow_nan=False) + "\n")


def as_json(judgement: Judgement) -> dict[str, Any]:
    """The finding as values."""
    return {
        "schema": 1,
        "colour": colour_of(judgement),
        "old": judgement.old.name,
        "new": judgement.new.name,
        "compared": judgement.compared,
        "findings": [
            {
                "level": one.level,
                "kind": one.seen.kind,
                "of": one.seen.of,
                "text": one.seen.text,
                "decided_by": one.decided_by,
            }
            for one in judgement.findings
        ],
    }


# What the gate found, as a report of about one screen.

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
