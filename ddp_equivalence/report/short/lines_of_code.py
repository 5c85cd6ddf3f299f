"""The lines of the user's code that a cause points at, each with what it did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_equivalence.diagnosis.repairs.repair import lines_of_repairs
from ddp_equivalence.report.line import Line
from ddp_equivalence.report.short.definition import link_to, source_of
from ddp_equivalence.report.short.text import cut, wrapped_lines
from ddp_equivalence.report.verdict_parts import lines_of_wrong_step

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.pointed_line import PointedLine
    from ddp_equivalence.report.verdict import Verdict

MOST_LINES = 3


def pointed_lines(verdict: Verdict, most: int = MOST_LINES) -> list[PointedLine]:
    """The lines that the causes point at, each once; the line of the fault is always among them.

    Without a cause, the lines that show where the difference is. Before them, or among them, come
    the lines of which a small edit repairs the step.
    """
    repaired = list(lines_of_repairs(verdict.repairs))
    if not repaired:
        return _fewer(_lines_of_cause(verdict), most)
    by_mark = sorted(_lines_of_cause(verdict), key=lambda one: not one.is_fault)
    if repaired[0].is_fault:
        edited = set(map(_place, repaired))
        others = [replace(one, is_fault=False) for one in by_mark if _place(one) not in edited]
        return [*repaired[: max(1, most - 1)], *others][:most]
    # The edits may leave out what is wrong elsewhere, so what was seen of a line is worth more.
    seen = set(map(_place, by_mark))
    only_edited = [one for one in repaired if _place(one) not in seen]
    return [*by_mark[:1], *only_edited[: max(1, most - 1)], *by_mark[1:]][:most]


def _place(pointed: PointedLine) -> tuple[str, int]:
    return pointed.line.file, pointed.line.number


def _lines_of_cause(verdict: Verdict) -> list[PointedLine]:
    best = verdict.findings[0] if verdict.findings else None
    if verdict.wrong_step is not None and verdict.wrong_step.differs != "gradients":
        return list(lines_of_wrong_step(verdict.wrong_step, verdict.observed))
    if best is None or not best.accepted:
        whereabouts = verdict.localisation.whereabouts
        return [] if whereabouts is None else list(whereabouts.lines)
    found: dict[tuple[str, int], PointedLine] = {}
    for finding in (best, *best.more):
        for pointed in finding.lines:
            place = pointed.line.file, pointed.line.number
            if place not in found or (pointed.is_fault and not found[place].is_fault):
                found[place] = pointed
    return list(found.values())


def _fewer(pointed_at: list[PointedLine], most: int) -> list[PointedLine]:
    """At most so many of the lines: those that are no fault are left out first."""
    while len(pointed_at) > most:
        innocent = [one for one in pointed_at if not one.is_fault]
        pointed_at.remove(innocent[-1] if innocent else pointed_at[-1])
    return pointed_at


def code_lines(pointed_at: Sequence[PointedLine], width: int, most: int) -> list[Line]:
    """Place, source and note of every line. Notes stand at the side if all of them fit there.

    ``most``: the lines that a note may take otherwise.
    """
    if not pointed_at:
        return []
    links = [link_to(one.line) for one in pointed_at]
    indent = 2 + max(len(link.text) for link in links) + 2
    sources = [cut(source_of(one.line), width - indent) for one in pointed_at]
    noted = [source for source, one in zip(sources, pointed_at, strict=True) if one.note]
    column = indent + max(map(len, noted), default=0) + 2
    at_the_side = all(column + len(one.note) <= width for one in pointed_at)
    lines = []
    for one, link, source in zip(pointed_at, links, sources, strict=True):
        mark = ">" if one.is_fault else " "
        head = f"{mark} {link.text:<{indent - 4}}  {source}"
        if one.note and at_the_side:
            head = f"{head:<{column}}{one.note}"
        lines.append(Line(head.rstrip(), link=link))
        if one.note and not at_the_side:
            lines += wrapped_lines(one.note, width, most, " " * indent)
        lines += _missing(one, indent, width)
    return lines


def _missing(pointed: PointedLine, indent: int, width: int) -> Iterator[Line]:
    if pointed.missing:
        label = "missing after it:"
        yield Line(cut(f"{'':<{indent}}{label} {pointed.missing}", width))
