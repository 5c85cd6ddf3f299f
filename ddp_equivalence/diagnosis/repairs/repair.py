"""An edit of the user's code with which every rank was seen to hold the big batch's gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddp_equivalence.case.edit import Edit, EditKind
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import CodeLine

LONGEST = 60
"""Longer code is cut."""

WHOLE_STATEMENTS = {
    EditKind.STATEMENT_LEFT_OUT: "without this statement",
    EditKind.STATEMENTS_SWAPPED: "with this statement behind the next one",
    EditKind.MOVED_OUT: "with this, and all below it in its block, behind the block",
    EditKind.CONTEXT_LEFT_OUT: "without this `with`",
}
"""Edits that are easier said than shown."""


BROAD = frozenset(
    {
        EditKind.ARGUMENTS_SWAPPED,
        EditKind.CONDITION,
        EditKind.CONSTANT,
        EditKind.CONTEXT_LEFT_OUT,
        EditKind.MOVED_OUT,
        EditKind.OVER_WORLD_SIZE,
        EditKind.REDUCED,
        EditKind.STATEMENT_LEFT_OUT,
        EditKind.STATEMENTS_SWAPPED,
        EditKind.TENSORS_OF_MODULE,
        EditKind.TIMES_WORLD_SIZE,
    }
)
"""Edits that often repair a step at another line than the faulty one: what leaves out the part that
has the fault, or scales it away, is right as well. Of the steps s161 to s200 in tests/faulty_steps,
these kinds repaired 8 at the faulty line and 22 elsewhere, all others 30 and 12 (each kind counted
once a step; a record of 2026-11-23). A condition that is turned round, and other tensors of a
module, were added later: they leave out what has the fault in the same way.
"""


@dataclass(frozen=True)
class Repair:
    """``before``, ``after``: the code that was replaced, and what stood there instead."""

    line: CodeLine
    before: str
    after: str
    kind: EditKind

    @property
    def is_broad(self) -> bool:
        """True for an edit that may repair the step although the fault is elsewhere."""
        return self.kind in BROAD

    @property
    def text(self) -> str:
        """The change, as part of a sentence: ``with `a - b` in place of `a + b` ``."""
        if self.kind in WHOLE_STATEMENTS:
            return WHOLE_STATEMENTS[self.kind]
        before = _on_one_line(self.before)
        if not self.after.strip():
            return f"without `{before.strip(', ')}`"
        return f"with `{_on_one_line(self.after)}` in place of `{before}`"


@dataclass(frozen=True)
class Repairs:
    """What the trials of edits have shown: ``found``, one for each line, the most likely first:
    those that are not broad, and of equal ones the first that was tried.

    ``right``: how many edits repair the step, several of one line among them. ``tried``: how many
    were tried, ``of`` so many. ``why_not``: why none was tried.
    """

    found: tuple[Repair, ...] = ()
    right: int = 0
    tried: int = 0
    of: int = 0
    why_not: str = ""

    @property
    def shows_the_fault(self) -> bool:
        """True if an edit was found that is not broad."""
        return bool(self.found) and not self.found[0].is_broad

    @property
    def fix(self) -> str:
        """Which edit repairs the step, and how many were tried; "" if none was found."""
        if not self.found:
            return ""
        first = self.found[0]
        if first.is_broad:
            what = f"the change of line {first.line.number} that was tried repairs the step"
            return f"{what}, but it may only leave out what is wrong elsewhere"
        change = f"make the change of line {first.line.number} that was tried, or one like it"
        # Some of the others hung, or were given up: of them it is not known.
        return f"{change}; {self.right} of {self.tried} changes tried repaired it"


def lines_of_repairs(repairs: Repairs) -> Iterator[PointedLine]:
    """The lines that were edited, for a report; the first is the most likely one."""
    for number, one in enumerate(repairs.found):
        note = f"tried: all gradients right {one.text}"
        yield PointedLine(one.line, note, is_fault=number == 0 and not one.is_broad)


def repair_of(edit: Edit, source: bytes) -> Repair:
    """``source``: the file before the edit."""
    before = source[edit.start : edit.end].decode()
    return Repair(CodeLine(edit.file, edit.line), before, edit.text, edit.kind)


def _on_one_line(code: str) -> str:
    text = " ".join(code.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
