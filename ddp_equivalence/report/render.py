"""Verdict -> text: the one tree of blocks that a report is, built once and printed short or whole.

A reader may stop after any block. Of a difference, the first blocks stand on one screen: what is
wrong, in which line, what the ranks hold, and what to write. The others follow in the whole report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.repairs.find_repairs import lines_of_repairs
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.measurement.calls import CodeLine, Kind
from ddp_equivalence.report.blocks import (
    MOST_LINES,
    Block,
    Code,
    Commands,
    FirstThatFits,
    Headline,
    Item,
    Notes,
    Sentences,
    fitted,
    place_name,
    whole,
)
from ddp_equivalence.report.cause import (
    cause_lines,
    error_text,
    how_sure,
    notes,
    other_causes_lines,
    where_it_lies,
)
from ddp_equivalence.report.evidence import evidence_lines
from ddp_equivalence.report.failure import failure_blocks, failure_screen, line_of
from ddp_equivalence.report.numbers import (
    asked_lines,
    held,
    how_many_differ,
    parameters_lines,
    shares_lines,
)
from ddp_equivalence.report.text import Line, Style, ended, paragraph, rank_names, ranks_by

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.diagnose import Finding
    from ddp_equivalence.measurement.observation import Observation
    from ddp_equivalence.report.verdict import Verdict, WrongStep

OUTPUT_LINES = 30

WARNED = re.compile(
    r"(?m)^\S+:(\d+): UserWarning: "
    r"(?=.*(?:optimizer|scheduler|DistributedDataParallel|sampler))(.*?)(?:\. |\.?$)"
)
"""A line that a rank printed: of which line torch warned that it trains otherwise than meant."""


def report_lines(verdict: Verdict) -> list[Line]:
    """The report, line by line: of a difference one screen, unless the run asks for everything."""
    if settings.current().full_report or (verdict.outcome != "different" and not verdict.failure):
        return full_lines(verdict)
    is_failure = verdict.outcome == "unknown"
    return fitted(_failed(verdict) if is_failure else _screen(verdict, is_whole=False))


def full_lines(verdict: Verdict) -> list[Line]:
    """All that is known, line by line. Of a difference, that of the screen comes first."""
    if verdict.outcome == "different":
        return whole([*_screen(verdict, is_whole=True), *map(Block, _different(verdict))])
    blocks = _same(verdict) if verdict.outcome == "same" else _unknown(verdict)
    return whole(list(map(Block, blocks)))


# The blocks of the whole report.


def _other_side(verdict: Verdict) -> str:
    """The name of what the ranks are compared with."""
    return "what one process computes" if verdict.asked.of_script else "big_batch"


def _same(verdict: Verdict) -> Iterator[list[Line]]:
    assert verdict.comparison is not None
    yield [Line(f"{verdict.subject} is {_other_side(verdict)}: same", Style.GOOD)]
    nearest, worst = verdict.nearest, verdict.comparison.worst
    numbers = error_text(verdict, verdict.floor) or "nothing compared"
    reason = f"limit: {worst.limit.reason}; worst parameter: {worst.name}" if worst else ""
    if nearest is not None:
        numbers += f"  nearest known fault {text_of(nearest.distance, '.1e')}"
        reason += f"; nearest fault: {nearest.cause}"
    yield [Line(f"  {numbers}"), *paragraph(reason, "  "), *_notes_lines(verdict)]
    yield evidence_lines(verdict)


def _different(verdict: Verdict) -> Iterator[list[Line]]:
    """The blocks that do not stand on the screen."""
    names = " and ".join(verdict.causes) or "no known cause fits"
    if not verdict.causes and not verdict.tried_every_cause:
        names = NOT_ALL_TRIED
    yield [Line(f"{verdict.subject} is not {_other_side(verdict)}: {names}", Style.BAD)]
    yield cause_lines(verdict)
    yield asked_lines(verdict)
    yield shares_lines(verdict)
    yield parameters_lines(verdict)
    yield [*other_causes_lines(verdict), *evidence_lines(verdict)]
    yield _output_lines(verdict)


def _unknown_line(verdict: Verdict) -> list[Line]:
    return [Line(f"{verdict.subject} against {_other_side(verdict)}: unknown", Style.UNCERTAIN)]


def _unknown(verdict: Verdict) -> Iterator[list[Line]]:
    yield _unknown_line(verdict)
    if verdict.failure is not None:
        yield from failure_blocks(
            verdict.failure, verdict.reason, verdict.second_look, verdict.lane
        )
        yield _notes_lines(verdict)
        yield _output_lines(verdict)
    else:
        yield [
            *paragraph(ended(f"{verdict.reason[:1].upper()}{verdict.reason[1:]}"), "  "),
            Line("  Nothing was shown, which is not a pass."),
            *_notes_lines(verdict),
        ]
        if verdict.comparison is not None and verdict.comparison.parameters:
            yield [Line(f"  {error_text(verdict, verdict.floor)}")]
    yield evidence_lines(verdict)


def _notes_lines(verdict: Verdict) -> list[Line]:
    return [line for note in notes(verdict) for line in paragraph(note, "  ")]


def _output_lines(verdict: Verdict) -> list[Line]:
    """The last lines that each rank printed. Ranks that printed the same share one entry."""
    printed_by = ((rank, text.rstrip() or None) for rank, text in sorted(verdict.output.items()))
    lines = []
    for text, ranks in ranks_by(printed_by).items():
        lines.append(Line(f"  Output of {rank_names(ranks)}"))
        lines += [Line(f"    | {line}") for line in text.splitlines()[-OUTPUT_LINES:]]
    return lines


# The blocks of the screen.


def _failed(verdict: Verdict) -> list[Block]:
    assert verdict.failure is not None
    failed = verdict.failure, verdict.reason, verdict.second_look, verdict.lane
    return [
        Block(_unknown_line(verdict)),
        *failure_screen(*failed),
        Block([Notes(list(notes(verdict))), _commands(verdict, is_whole=False)], gap=3),
    ]


def _screen(verdict: Verdict, is_whole: bool) -> list[Block]:
    counts = how_many_differ(verdict)
    sure = [text for text in (how_sure(verdict), counts) if text]
    beside = list(notes(verdict))
    warned = [WARNED.search(text) for text in verdict.output.values()]
    beside += dict.fromkeys(
        f"torch warns of line {one[1]}: {ended(one[2])}" for one in warned if one
    )
    end: list[Item] = [
        *(Sentences(ended(text), "Tried: ", "fix") for text in _tried(verdict)),
        *(Sentences(ended(fix), "Fix: ", "fix") for fix in fixes(verdict)),
        FirstThatFits(sure, partial(how_many_differ, verdict) if counts else None),
        Notes(beside),
        _commands(verdict, is_whole),
    ]
    where = [Sentences(text) for text in (*_details(verdict), *where_it_lies(verdict))]
    return [
        Block([_headline(verdict)]),
        Block([*where, Code(partial(pointed_lines, verdict))], gap=2),
        Block(held(verdict), gap=1),
        Block(end, gap=3),
    ]


def _commands(verdict: Verdict, is_whole: bool) -> Commands:
    again = [f"Again: {verdict.repeat}"] if verdict.repeat else []
    return Commands(
        [*again, *([] if is_whole else [f"More: {settings.current().full_report_with}"])]
    )


def _details(verdict: Verdict) -> Iterator[str]:
    """Which ranks or numbers it is about, and what was seen, if no line of code says it."""
    best = verdict.best
    if best is None:
        return
    lines = pointed_lines(verdict)
    seen = "" if lines else best.because
    if not any(one.of_rows for one in HYPOTHESES if one.name in verdict.causes):
        yield verdict.localisation.rows
    said = " ".join([seen, *(one.note for one in lines)])
    is_said = set(best.detail.split()) <= set(seen.split()) or best.detail in said
    if best.detail and not is_said:
        yield f"Namely: {best.detail}"
    yield seen and f"Seen: {seen}"


def fixes(verdict: Verdict) -> list[str]:
    """The fix of each cause; without a cause, that of the place where the difference is. None
    beside an edit that repairs the step.
    """
    best, found = verdict.best, verdict.localisation.whereabouts
    if verdict.repairs.shows_the_fault:
        return []
    if best is not None:
        return [fix for fix in dict.fromkeys(one.fix for one in (best, *best.more)) if fix]
    return [found.fix] if found is not None and found.fix else []


def _tried(verdict: Verdict) -> list[str]:
    """The edits that repair the step; none that lie far from each other beside a fix."""
    repairs = verdict.repairs
    is_shown = repairs.shows_the_fault or not fixes(verdict)
    return [repairs.text] if repairs.text and is_shown else []


# The first line of a report: the step, where it stands, what is wrong, and the cause's name.

END_OF_CLAUSE = re.compile(r"[,;:.](?= |$)| \(")
NOT_ALL_TRIED = "no cause found, because not all known causes were tried"


def headline_text(verdict: Verdict) -> str:
    """The first line of the report, on one line whatever the width."""
    if verdict.outcome != "different":
        return str(verdict).partition("\n")[0]
    headline = _headline(verdict)
    return f"{headline.text}  {headline.name}"


def _headline(verdict: Verdict) -> Headline:
    at, causes = verdict.asked.defined_at, verdict.causes
    place = "" if at is None else f" ({place_name(at)})"
    found = None if causes else verdict.localisation.whereabouts
    is_told = found is not None and bool(found.fix)
    return Headline(
        text=f"different: {verdict.subject}{place}: {_what(verdict)}",
        name="" if is_told else f"[{' and '.join(causes) or 'no known cause'}]",
        is_named=bool(causes),
    )


def _what(verdict: Verdict) -> str:
    best, wrong = verdict.best, verdict.wrong_step
    if best is not None:
        factor = "" if best.besides is None else text_of(best.besides, ".4g")
        besides = f", and {factor} times besides" if factor else ""
        return ", and ".join(map(_what_happened, (best, *best.more))) + besides
    if not verdict.tried_every_cause:
        return NOT_ALL_TRIED
    found = verdict.localisation.whereabouts
    if verdict.comparison is not None and verdict.comparison.structure:
        if found is not None and found.what == "gradients missing":
            return found.headline
        if wrong is not None and verdict.comparison.missing:  # of what an optimizer steps with
            return f"no optimizer steps {names_text(verdict.comparison.missing)}"
        return "names, shapes or types are not those of the big batch"
    if wrong is not None and wrong.differs != "gradients":
        return wrong.headline
    repaired = _repaired_elsewhere(verdict)
    if repaired:
        lines = " or ".join(str(one.line.number) for one in repaired)
        return f"a change in line {lines} makes all gradients right"
    if found is not None and found.kind != "not seen":
        return found.headline
    return "no known cause fits" if wrong is None else wrong.headline


def _what_happened(finding: Finding) -> str:
    """The cause in a few words."""
    if finding.headline:
        return finding.headline
    clause = END_OF_CLAUSE.split(finding.sentence, maxsplit=1)[0]
    first_word = clause.partition(" ")[0]
    is_a_name = first_word[1:] != first_word[1:].lower()
    return clause if is_a_name else f"{clause[:1].lower()}{clause[1:]}"


# The lines of the user's code that a verdict points at, each with what it did.


def pointed_lines(verdict: Verdict, most: int = MOST_LINES) -> Sequence[PointedLine]:
    """The lines that the causes point at, each once; the line of the fault is always among them.

    Without a cause, the lines that show where the difference is. Before them, or among them, come
    the lines of which a small edit repairs the step.
    """
    repaired, of_cause = list(lines_of_repairs(verdict.repairs)), _lines_of_cause(verdict)
    if not repaired:
        while len(of_cause) > most:  # those that are no fault are left out first
            innocent = [one for one in of_cause if not one.is_fault]
            of_cause.remove((innocent or of_cause)[-1])
        return of_cause
    by_mark = sorted(of_cause, key=lambda one: not one.is_fault)
    elsewhere = _repaired_elsewhere(verdict)
    if elsewhere:  # what leads to the mistake is one of several lines
        by_mark = [replace(one, is_fault=False) for one in by_mark]
    if repaired[0].is_fault:
        notes = {_place(one): one.note for one in of_cause}
        repaired[0] = replace(repaired[0], note=notes.get(_place(repaired[0]), ""))
        edited = set(map(_place, repaired))
        others = [replace(one, is_fault=False) for one in by_mark if _place(one) not in edited]
        edited_first = [one for one in verdict.repairs.found if not one.is_broad]
        return _apart([*repaired[: max(1, most - 1, len(edited_first))], *others])[:most]
    # The edits may leave out what is wrong elsewhere, so what was seen of a line is worth more.
    seen = set(map(_place, by_mark))
    only_edited = [one for one in repaired if _place(one) not in seen]
    if elsewhere:
        return _apart([*repaired[: len(elsewhere)], *by_mark])[:most]
    return _apart([*by_mark[:1], *only_edited[: max(1, most - 1)], *by_mark[1:]])[:most]


def _repaired_elsewhere(verdict: Verdict) -> list[PointedLine]:
    """The lines of which edits repair the step, if they are far from what else is shown."""
    repairs, of_cause = verdict.repairs, _lines_of_cause(verdict)
    edited = [PointedLine(one.line) for one in repairs.told]
    if repairs.shows_the_fault:
        return [] if _is_near(edited[0], of_cause) else edited
    marked = {_place(one) for one in of_cause if one.is_fault}
    every = {(one.line.file, one.line.number) for one in repairs.found if not one.is_broad}
    return [] if marked & every else edited


NEAR = 2
"""Whoever reads a line of code sees so many lines above and below it as well."""


def _apart(pointed: Sequence[PointedLine]) -> list[PointedLine]:
    """The lines, those last that are near an earlier one."""
    apart, near = list[PointedLine](), list[PointedLine]()
    for one in pointed:
        (near if _is_near(one, apart) else apart).append(one)
    return [*apart, *near]


def _is_near(one: PointedLine, others: Sequence[PointedLine]) -> bool:
    """True if one of the others is on the same line, or near it."""
    places = [_place(other) for other in others]
    around = range(one.line.number - NEAR, one.line.number + NEAR + 1)
    return any((one.line.file, number) in places for number in around)


def _place(pointed: PointedLine) -> tuple[str, int]:
    return pointed.line.file, pointed.line.number


def _lines_of_cause(verdict: Verdict) -> list[PointedLine]:
    best, wrong = verdict.best, verdict.wrong_step
    if best is None and wrong is not None and wrong.differs != "gradients":
        return _lines_of_wrong_step(wrong, verdict.observed)
    if best is None:
        found = verdict.localisation.whereabouts
        shown = [] if found is None else list(found.lines)
        is_marked = any(one.is_fault for one in shown)
        return [one for one in shown if not (is_marked and one.begins_backward)]
    lines: dict[tuple[str, int], PointedLine] = {}
    for pointed in (pointed for one in (best, *best.more) for pointed in one.lines):
        place = _place(pointed)
        if place not in lines or (pointed.is_fault and not lines[place].is_fault):
            lines[place] = pointed
    return list(lines.values())


JOINED = (
    "divides by all ranks, also where some have ended; with divide_by_initial_world_size=False by "
    "those that are left"
)


def _lines_of_wrong_step(
    wrong: WrongStep, observed: Mapping[int, Observation]
) -> list[PointedLine]:
    """The line whose step is wrong although its gradients are right, or that steps too often."""
    calls = next(iter(observed.values())).calls if observed else ()
    lines = [one.line for one in calls if one.kind is Kind.OPTIMIZER_STEP and one.line]
    if wrong.differs == "count" and lines:
        divide = [one.line for one in calls if one.kind is Kind.JOIN and one.value and one.line]
        if divide and len(set(wrong.made)) > 1:
            return [PointedLine(divide[0], JOINED, is_fault=True)]
        return [PointedLine(lines[-1], "this is where an optimizer steps")]
    if wrong.number is None or len(lines) < wrong.number:
        return []
    return [PointedLine(lines[wrong.number - 1])]


def line_to_look_at(verdict: Verdict) -> CodeLine | None:
    """The line to change, or where a rank failed, or where the step is defined; None if unknown."""
    if verdict.outcome == "different":
        faults = [one.line for one in pointed_lines(verdict) if one.is_fault]
        if faults:
            return faults[-1]
    ends = () if verdict.failure is None else verdict.failure.ends[:1]
    return next(filter(None, (line_of(end.line) for end in ends)), verdict.asked.defined_at)
