"""The report of a difference on one screen: what is wrong, in which line, and what to write."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.examples_read import short_numbers
from ddp_equivalence.diagnosis.repairs.find_repairs import lines_of_repairs
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.report.cause import FRESH_RANKS, fresh_ranks_text, random_number_text
from ddp_equivalence.report.short.held import (
    MOST_ROWS,
    cut,
    ended,
    held_lines,
    shortened,
    wrapped_lines,
)
from ddp_equivalence.report.text import Line, Link, Style, plural
from ddp_equivalence.report.verdict import lines_of_wrong_step

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.diagnose import Finding
    from ddp_equivalence.diagnosis.setting import PointedLine
    from ddp_equivalence.report.verdict import Verdict


# The first line of a report: the step, where it stands, what is wrong, and the cause's name.

END_OF_CLAUSE = re.compile(r"[,;:.](?= |$)| \(")

HEADLINE_GAP = 2
"""Columns that stand at least between the sentence and the name."""


def headline_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """The headline; the name of the cause stands at the right, on a line of its own if it must.

    That there is no known cause is said only where there is room for it.

    ``most``: the lines that the sentence may take.
    """
    text, name = _sentence(verdict), _name(verdict)
    link = None if verdict.defined_at is None else link_to(verdict.defined_at)
    if len(text) + len(name) + HEADLINE_GAP <= width:
        spaces = width - len(text) - len(name)
        lines = [f"{text}{' ' * spaces if name else ''}{name}"]
    else:
        lines = [line.text for line in wrapped_lines(text, width, most, "")]
        if len(lines[-1]) + len(name) + HEADLINE_GAP <= width:
            lines[-1] += " " * (width - len(lines[-1]) - len(name)) + name
        elif verdict.causes:
            lines.append(name.rjust(width))
    first, *rest = lines
    return [Line(first, Style.BAD, link=link), *(Line(line, Style.BAD) for line in rest)]


def headline_text(verdict: Verdict) -> str:
    """The first line of the report, on one line whatever the width."""
    if verdict.outcome != "different":
        return str(verdict).partition("\n")[0]
    return f"{_sentence(verdict)}  {_name(verdict)}".rstrip()


def what_happened(finding: Finding) -> str:
    """The cause in a few words."""
    if finding.headline:
        return finding.headline
    clause = END_OF_CLAUSE.split(finding.sentence, maxsplit=1)[0]
    first_word = clause.partition(" ")[0]
    is_a_name = first_word[1:] != first_word[1:].lower()
    return clause if is_a_name else f"{clause[:1].lower()}{clause[1:]}"


def besides_text(finding: Finding) -> str:
    """The factor that the cause leaves, in a few words; "" without one."""
    return "" if finding.besides is None else f"{text_of(finding.besides, '.4g')} times besides"


def _sentence(verdict: Verdict) -> str:
    place = "" if verdict.defined_at is None else f" ({place_name(verdict.defined_at)})"
    return f"different: {verdict.subject}{place}: {_what(verdict)}"


def _what(verdict: Verdict) -> str:
    best = verdict.findings[0] if verdict.findings else None
    if best is None or not best.accepted:
        if not verdict.tried_every_cause:
            return "no cause found, because not all known causes were tried"
        if verdict.comparison is not None and verdict.comparison.structure:
            return "names, shapes or types are not those of the big batch"
        if verdict.wrong_step is not None and verdict.wrong_step.differs != "gradients":
            return verdict.wrong_step.headline
        whereabouts = verdict.localisation.whereabouts
        seen = whereabouts is not None and whereabouts.kind != "not seen"
        if verdict.wrong_step is not None and not seen:
            return verdict.wrong_step.headline
        return whereabouts.headline if whereabouts is not None and seen else "no known cause fits"
    besides = "" if best.besides is None else f", and {besides_text(best)}"
    return ", and ".join(what_happened(one) for one in (best, *best.more)) + besides


def _name(verdict: Verdict) -> str:
    return f"[{' and '.join(verdict.causes) or 'no known cause'}]"


# How sure the cause is, and by how much the result is off.

LONGEST_NAME = 45
SHORTEST_NAME = 16
MOST_OTHERS = 2

ORDINARY_LANES = ("gloo", "gloo_fallback")
"""On any other lane the report says which it was."""

ALL = 1e-3
"""A cause that leaves less than this unexplained, which rounding may do, explains everything."""


def sure_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """How sure, and the counts: on one line if they fit, else at most so many lines for each."""
    counts = _counts(verdict)
    texts = [text for text in (_how_sure(verdict), counts) if text]
    if not texts:
        return []
    together = "  " + " ".join(texts)
    if len(together) <= width:
        return [Line(together)]
    too_long = len(counts) + 2 - width
    if most == 1 and too_long > 0:  # dots may stand in a name, and not for a number
        texts[-1] = _counts(verdict, too_long)
    return [line for text in texts for line in wrapped_lines(text, width, most)]


def _how_sure(verdict: Verdict) -> str:
    accepted = [finding for finding in verdict.findings if finding.accepted]
    if not accepted:
        return ""
    best, *others = accepted
    if others:
        return _not_told_apart(best, others)
    if best.besides is not None:
        factor = text_of(best.besides, ".4g")
        return f"Explains all but a factor of {factor}, which every gradient has besides."
    if best.unexplained is None and verdict.comparison is not None and verdict.comparison.same:
        return "All gradients of this step are right."
    if best.unexplained is None:
        seen = "Seen to happen; its effect on the numbers cannot be computed."
        return seen if _was_seen(best) else ""
    if not best.fits:
        return "Seen happening; the numbers have other reasons too."
    if not _was_seen(best):
        taken = " (one was taken from the result itself)" if best.fitted else ""
        return f"Fits the numbers{taken}; not seen happening."
    if best.unexplained > ALL:
        return f"Explains all but {text_of(100 * best.unexplained, '.2g')} % of the norm."
    return f"Explains {_elements(verdict)}."


def _not_told_apart(best: Finding, others: list[Finding]) -> str:
    names = [" and ".join(finding.causes) for finding in others]
    shown = " or ".join(names[:MOST_OTHERS])
    more = f" (or {len(names) - MOST_OTHERS} more)" if len(names) > MOST_OTHERS else ""
    advice = next((one.tell_apart for one in (best, *others) if one.tell_apart), "")
    end = f"; {advice[:1].lower()}{advice[1:]}" if advice else "."
    return f"Fits, but {shown}{more} would leave the same numbers{end}"


def _was_seen(finding: Finding) -> bool:
    if finding.is_guess:
        return False
    return any(one.lines or one.because for one in (finding, *finding.more))


def _elements(verdict: Verdict) -> str:
    view = verdict.view
    whole = view is None or view.parameters.sample.is_whole
    return "every element" if whole else "every element that was looked at"


def _counts(verdict: Verdict, left_out: int = 0) -> str:
    """How many parameters differ, and the worst. ``left_out``: so many characters of its name."""
    comparison = verdict.comparison
    assert comparison is not None
    differing = comparison.differing
    if not differing:
        return ""
    worst, count = differing[0], len(comparison.parameters)
    error = worst.worst
    text = (
        f"{len(differing)} of {count} {plural(count, 'parameter')} "
        f"{plural(len(differing), 'differs', 'differ')}"
    )
    longest = max(min(len(worst.name), LONGEST_NAME) - left_out, SHORTEST_NAME)
    text += f"{', most' if len(differing) > 1 else ':'} {shortened(worst.name, longest)}"
    if error.alone or error.error <= worst.limit.relative:
        off, limit = text_of(error.element, ".2g"), text_of(worst.limit.element, ".2g")
        place = f"element {list(error.place)} on rank {error.rank}"
        return f"{text}, {place}: error {off}, limit {limit}{_lane(verdict)}."
    separator = ":" if len(differing) > 1 else ","
    off, limit = text_of(error.error, ".2g"), text_of(worst.limit.relative, ".2g")
    return f"{text}{separator} error {off}, limit {limit}{_lane(verdict)}."


def _lane(verdict: Verdict) -> str:
    """Where this was measured. It takes no line of its own, which lines of code would lack."""
    name = verdict.lane.name
    return "" if name in ORDINARY_LANES else f", lane {name}"


# A difference without a known cause: what is known about where it comes from.

MOST_MODULES = 2
MOST_NAMES = 3


def unnamed_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """Where the difference lies, at most so many lines for each fact; nothing with a cause."""
    if verdict.causes:
        return []
    return [line for text in _where(verdict) for line in wrapped_lines(text, width, most)]


def _where(verdict: Verdict) -> Iterator[str]:
    localisation, wrong = verdict.localisation, verdict.wrong_step
    if wrong is not None and wrong.differs != "gradients":
        return  # the note says what is wrong, and nothing else is known
    yield from filter(None, (localisation.rows,))
    if localisation.whereabouts is not None:
        found = localisation.whereabouts
        texts = [" ".join(filter(None, (found.beside_one_rank, found.marks))), found.sentence]
        if verdict.repairs.shows_the_fault:  # the lines that these texts say are marked are not
            texts = [found.beside_one_rank]
        yield from filter(None, texts)
    by_module = (localisation.findings_by_module or {}).items()
    certain = [(module, one.cause) for module, one in by_module if not one.fitted]
    for module, cause in certain[:MOST_MODULES]:
        name = module or "the model itself"
        yield f"On the parameters of {name} alone, the numbers fit {cause}."
    yield from _weights(verdict)


def _weights(verdict: Verdict) -> Iterator[str]:
    """Says so if all that is wrong is a multiple of the weights: of a few, it may be chance."""
    multiples, comparison = verdict.localisation.weight_multiples, verdict.comparison
    assert comparison is not None
    differing = [one.name for one in comparison.differing]
    if not multiples or not differing or not multiples.keys() >= set(differing):
        return
    names = ", ".join(differing[:MOST_NAMES])
    more = ", ..." if len(differing) > MOST_NAMES else ""
    factors = ", ".join(dict.fromkeys(text_of(multiples[name], ".2g") for name in differing))
    error = f"The error of {names}{more} is {factors} times the weights"
    yield f"{error}: look at weight decay and penalties."


# The end of a report: the fix, what else a reader must know, and how to repeat the check.

GAP = "     "

MOST_EXAMPLES = 8
"""So many examples of one step are listed."""


def fix_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """What to write instead, at most so many lines for each cause."""
    lines = []
    for fix in _fixes(verdict):
        first, *rest = wrapped_lines(f"Fix: {ended(fix)}", width, most)
        lines += [Line(first.text, Style.LABEL, styled=len("  Fix:")), *rest]
    return lines


def _fixes(verdict: Verdict) -> list[str]:
    """The edit that repairs the step, if one was found; otherwise the fix of each cause; without a
    cause, that of the place where the difference is.
    """
    if verdict.repairs.shows_the_fault:
        return [verdict.repairs.fix]
    best = verdict.findings[0] if verdict.findings else None
    if best is not None and best.accepted:
        fixes = [one.fix for one in (best, *best.more)]
    else:
        whereabouts = verdict.localisation.whereabouts
        fixes = [] if whereabouts is None else [whereabouts.fix or verdict.repairs.fix]
    return [fix for fix in dict.fromkeys(fixes) if fix]


def note_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """What is not as a reader expects it, at most so many lines for each."""
    return [line for text in _notes(verdict) for line in wrapped_lines(text, width, most)]


def _notes(verdict: Verdict) -> Iterator[str]:
    if verdict.planted:
        yield f"The fault {verdict.planted} was planted on purpose."
    yield from training_notes(verdict)
    if verdict.repeated is False:
        yield "The same step left other bits when it ran again: a race, or an unseeded generator."
    if drawn := random_number_text(verdict):
        yield drawn
    if verdict.float32_at:
        yield f"Off by float32's rounding; the step computes in float32: {verdict.float32_at}"
    if verdict.why_not_float64:
        yield "The loss cannot be computed in float64, so the big batch was not, either."
    if verdict.masks_unpredictable:
        again = verdict.without_dropout
        yield f"Without dropout: {'not judged' if again is None else again.outcome}."
    if fresh := fresh_ranks_text(verdict):
        yield f"{FRESH_RANKS}{fresh}"
    if not verdict.observed and verdict.why_not_watched and not verdict.repairs.found:
        yield f"No lines of code are known, because {verdict.why_not_watched}."
    if verdict.not_tried and verdict.analysis is not None:
        deadline = verdict.analysis.time.deadline
        first, *more = verdict.not_tried
        left = f"{first} and more" if more else first
        yield f"The deadline of {deadline:g} s left no time for {left}."
    if any(text.strip() for text in verdict.output.values()):
        yield "The ranks printed something, which the whole report shows."


def training_notes(verdict: Verdict) -> Iterator[str]:
    """How the reference trains, and which step of a trainer is wrong."""
    if verdict.wrong_step is not None:
        yield verdict.wrong_step.sentence
    if verdict.read_in_another_order:
        yield "The big batches follow what the steps read: another order than the batch has."
        if verdict.wrong_step is not None and verdict.wrong_step.number is not None:
            yield _examples_of_step_text(verdict, verdict.wrong_step.number)
    if verdict.training.is_of_the_user:
        yield _own_reference_text(verdict)
    elif verdict.outcome == "same":
        return
    elif verdict.compare == "update" and verdict.training.is_plain_sgd:
        yield f"Compared with plain SGD, learning rate {verdict.lr:g}: is that what the step does?"
    elif verdict.compare == "update":
        yield "Compared with your optimizer= and clip=: are they those of the step?"


def _examples_of_step_text(verdict: Verdict, number: int) -> str:
    """Which examples of the batch a report that counts those of one step from 0 speaks of."""
    first = sum(verdict.examples[: number - 1])
    of_step = verdict.read_order[first : first + verdict.examples[number - 1]]
    numbers = short_numbers(of_step, MOST_EXAMPLES)
    return f"Examples 0 to {len(of_step) - 1} of step {number} are {numbers} of the batch."


def _own_reference_text(verdict: Verdict) -> str:
    text = "Compared with your own reference="
    return f"{text}." if verdict.outcome == "same" else f"{text}, from which no cause is predicted."


def again_lines(verdict: Verdict, width: int) -> list[Line]:
    """The command that repeats the check, never broken, and how to get the whole report."""
    more = f"More: {settings.current().full_report_with}"
    if not verdict.repeat:
        return [_label(more)]
    again = f"Again: {verdict.repeat}"
    together = f"{again}{GAP}{more}"
    if len(together) + 2 <= width:
        return [_label(together)]
    return [_label(again), _label(more)]


def _label(text: str) -> Line:
    return Line(f"  {text}", Style.LABEL, styled=2 + text.index(":") + 1)


# The lines of the user's code that a cause points at, each with what it did.

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


# Puts the parts of a short report together, so that they fit on one screen.
#
# Where they do not fit, the table gives up rows first, then empty lines go, then texts are cut,
# then the code gives up lines.

MOST_ROWS_OF_SCREEN = 16
WIDEST = 100
MOST_NOTES = 3

OF_ROWS = frozenset(
    {"every_rank_same_data", "ranks_shuffle_apart", "shares_overlap", "sampler_padding_counted"}
    | {"examples_dropped"}
)
"""The causes that say themselves which examples were read again, or by no rank."""

Block = list[Line]


@dataclass(frozen=True)
class _Shape:
    """How much of everything is shown.

    ``texts``: the lines that one text may take. ``line_notes``: those of the note on a line of
    code. ``fix``: those of the fix, which is cut last. ``details``: also the shares by micro-batch
    and by example. ``gaps``: the empty lines between the parts: all three, without that above the
    fix, only that above what the ranks hold, or none.
    """

    code: int = MOST_LINES
    texts: int = 2
    line_notes: int = 2
    fix: int = 2
    rows: int = MOST_ROWS
    details: bool = True
    notes: int = MOST_NOTES
    gaps: int = 3


def short_lines(verdict: Verdict) -> list[Line]:
    """The report of a difference, at most 16 lines of 100 columns."""
    width = min(settings.current().width, WIDEST)
    lines: list[Line] = []
    for shape in _shapes(is_named=bool(verdict.causes)):
        lines = list(_lines(verdict, shape, width))
        if sum(_rows(line, width) for line in lines) <= MOST_ROWS_OF_SCREEN:
            break
    return lines


def _shapes(is_named: bool) -> Iterator[_Shape]:
    """All shapes that are tried, the largest first. ``is_named``: the difference has a cause."""
    for code in range(MOST_LINES, 0, -1):
        # A whole text is worth more than an empty line, and so is a line of code.
        for texts, line_notes in ((2, 2), (1, 2), (1, 1)):
            for details in (True, False):
                for gaps in (3, 2, 1):
                    for rows in range(MOST_ROWS, 1, -1):
                        yield _Shape(code, texts, line_notes, rows=rows, details=details, gaps=gaps)
        for line_notes in (2, 1):
            yield _Shape(code, 1, line_notes, rows=2, details=False, gaps=0)
        # Two lines of code are worth more than the table. Where no cause explains the table, all
        # of them are.
        if code == 2 or (code > 2 and not is_named):
            yield _Shape(code, 1, 1, rows=0, details=False, gaps=0)
    yield _Shape(1, 1, 1, rows=0)
    yield _Shape(1, 1, 1, rows=0, notes=1)
    yield _Shape(1, 1, 1, fix=1, rows=0, notes=1, gaps=0)


def _lines(verdict: Verdict, shape: _Shape, width: int) -> Iterator[Line]:
    blocks = [
        headline_lines(verdict, width, 1 + shape.texts),
        [
            *_details(verdict, width, shape.texts),
            *unnamed_lines(verdict, width, shape.texts),
            *code_lines(pointed_lines(verdict, shape.code), width, shape.line_notes),
        ],
        held_lines(verdict, shape.rows, width, shape.details),
        [
            *fix_lines(verdict, width, shape.fix),
            *sure_lines(verdict, width, shape.texts),
            *note_lines(verdict, width, shape.texts)[: shape.notes],
            *again_lines(verdict, width),
        ],
    ]
    above = {3: (1, 2, 3), 2: (1, 2), 1: (2,), 0: ()}[shape.gaps]
    for number, block in enumerate(blocks):
        if block and number in above:
            yield Line("")
        yield from block


def _details(verdict: Verdict, width: int, most: int) -> Block:
    """Which ranks or numbers it is about, and what was seen, if no line of code says it.

    ``most``: the lines that each of the two may take.
    """
    best = verdict.findings[0] if verdict.findings else None
    if best is None or not best.accepted:
        return []
    seen = "" if pointed_lines(verdict) else best.because
    lines = []
    if verdict.localisation.rows and not OF_ROWS.intersection(verdict.causes):
        lines += wrapped_lines(verdict.localisation.rows, width, most)
    if best.detail and not set(best.detail.split()) <= set(seen.split()):
        lines += wrapped_lines(f"Namely: {best.detail}", width, most)
    if seen:
        lines += wrapped_lines(f"Seen: {seen}", width, most)
    return lines


def _rows(line: Line, width: int) -> int:
    """The rows that a terminal of this width needs: a command may be longer than one."""
    return max(1, -(-len(line.text) // max(width, WIDEST)))


# The one line of code that a verdict is about.

PLACE = re.compile(r"^(?P<file>.+?):(?P<number>\d+): ")
"""How the end of a rank names a line."""


def line_to_look_at(verdict: Verdict) -> CodeLine | None:
    """The line to change, or where a rank failed, or where the step is defined; None if unknown."""
    if verdict.outcome == "different":
        pointed_at = pointed_lines(verdict)
        faults = [one.line for one in pointed_at if one.is_fault]
        if faults:
            return faults[-1]
    if verdict.failure is not None and verdict.failure.ends:
        place = PLACE.match(verdict.failure.ends[0].line)
        if place is not None:
            return CodeLine(place["file"], int(place["number"]))
    return verdict.defined_at


# Where the user's step is defined, and how a line of code is named in a report.

LONGEST_PATH = 40
"""A longer path is shortened to the name of its file."""


def defined_at(step: object) -> CodeLine | None:
    """The line that defines the step; None for a name, and for what is not written in Python."""
    if isinstance(step, type):
        return _class_line(step)
    try:
        function = inspect.unwrap(step) if callable(step) else step
    except ValueError:  # the wrappers form a cycle
        return None
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__") and not inspect.ismethod(function):
        function = vars(type(function)).get("__call__", function)  # an object that can be called
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith("<"):
        return None
    return CodeLine(code.co_filename, _line_of_def(code.co_filename, code), code.co_name)


def _class_line(step: type) -> CodeLine | None:
    """Where a class begins that is made for each rank; None if its source cannot be found."""
    try:
        file, number = inspect.getsourcefile(step), inspect.findsource(step)[1] + 1
    except (OSError, TypeError):
        return None
    return None if file is None else CodeLine(file, number, step.__name__)


def _line_of_def(file: str, code: object) -> int:
    """Python counts a function from its first decorator; a reader looks for ``def``."""
    first: int = getattr(code, "co_firstlineno", 1)
    name = f"def {getattr(code, 'co_name', '')}("
    for number, text in enumerate(linecache.getlines(file)[first - 1 : first + 20], start=first):
        if name in text:
            return number
    return first


def place_name(line: CodeLine) -> str:
    """``folder/file.py:12``, from the working folder if the file lies below it."""
    path = os.path.abspath(line.file)
    try:
        path = os.path.relpath(path)
    except ValueError:  # on another drive
        path = os.path.basename(path)
    if path.startswith(os.pardir) or len(path) > LONGEST_PATH:
        path = os.path.basename(path)
    return f"{path}:{line.number}"


def link_to(line: CodeLine) -> Link:
    """The name of the line, with what a terminal needs to open it."""
    return Link(place_name(line), line.file, line.number)


def source_of(line: CodeLine) -> str:
    """The text of the line; "" if the file cannot be read."""
    return linecache.getline(line.file, line.number).strip()
