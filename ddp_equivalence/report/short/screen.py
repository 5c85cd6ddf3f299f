"""Puts the parts of a short report together, so that they fit on one screen.

Where they do not fit, the table gives up rows first, then the code gives up lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

Block = list[Line]


def short_lines(verdict: Verdict) -> list[Line]:
    """The report of a difference, at most 16 lines of 100 columns."""
    width = min(settings.current().width, WIDEST)
    ends = [
        *fix_lines(verdict, width),
        *sure_lines(verdict, width),
        *note_lines(verdict, width)[:MOST_NOTES],
        *again_lines(verdict, width),
    ]
    lines: list[Line] = []
    for code, details, rows in _shapes():
        blocks = [
            headline_lines(verdict, width),
            [
                *_details(verdict, width, details),
                *unnamed_lines(verdict, width, details),
                *code_lines(pointed_lines(verdict, code), width),
            ],
            held_lines(verdict, rows, width),
            ends,
        ]
        lines = list(_joined(blocks))
        if sum(_rows(line, width) for line in lines) <= MOST_ROWS_OF_SCREEN:
            return lines
    return lines


def _shapes() -> Iterator[tuple[int, int, int]]:
    """How many lines of code, of each detail and of the table's rows are tried, the most first."""
    for code in range(MOST_LINES, 0, -1):
        for details in (2, 1):
            for rows in range(MOST_ROWS, 1, -1):
                yield code, details, rows
    yield 1, 1, 0


def _details(verdict: Verdict, width: int, most: int) -> Block:
    """Which ranks or numbers it is about, and what was seen, if no line of code says it.

    ``most``: the lines that each of the two may take.
    """
    best = verdict.findings[0] if verdict.findings else None
    if best is None or not best.accepted:
        return []
    seen = "" if pointed_lines(verdict) else best.because
    lines = []
    if best.detail and not set(best.detail.split()) <= set(seen.split()):
        lines += wrapped_lines(f"Namely: {best.detail}", width, most)
    if seen:
        lines += wrapped_lines(f"Seen: {seen}", width, most)
    return lines


def _joined(blocks: Sequence[Block]) -> Iterator[Line]:
    """The blocks, with an empty line between two of them."""
    for number, block in enumerate(block for block in blocks if block):
        if number:
            yield Line("")
        yield from block


def _rows(line: Line, width: int) -> int:
    """The rows that a terminal of this width needs: a command may be longer than one."""
    return max(1, -(-len(line.text) // max(width, WIDEST)))
