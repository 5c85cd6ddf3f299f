"""Puts the parts of a short report together, so that they fit on one screen.

Where they do not fit, the table gives up rows first, then empty lines go, then texts are cut, then
the code gives up lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.report.line import Line
from ddp_equivalence.report.short.ending import again_lines, fix_lines, note_lines
from ddp_equivalence.report.short.headline import headline_lines
from ddp_equivalence.report.short.held import held_lines
from ddp_equivalence.report.short.lines_of_code import MOST_LINES, code_lines, pointed_lines
from ddp_equivalence.report.short.shares import MOST_ROWS
from ddp_equivalence.report.short.sure import sure_lines
from ddp_equivalence.report.short.text import wrapped_lines
from ddp_equivalence.report.short.unnamed import unnamed_lines

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

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
