"""The blocks that a report is made of, and the one renderer that prints them: whole, or those of
the screen cut so far that they fit on it.

Where they do not fit, the table gives up rows first, then empty lines go, then texts are cut, then
the code gives up lines.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ddp_equivalence.case import settings
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.report.text import EVERYTHING, Line, Style, cut, labelled, wrapped_at_most

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.setting import PointedLine

MOST_ROWS_OF_SCREEN = 16
WIDEST_SCREEN = 100
MOST_LINES = 3
"""So many lines of code are shown at most."""

MOST_ROWS = 6
"""So many rows of a table are shown at most."""


@dataclass(frozen=True)
class Shape:
    """How much of everything is shown.

    ``width``: of a screen. ``code``: lines of code. ``texts``: the lines that one text may take.
    ``line_notes``: those of the note on a line of code. ``bare``: so many of the last lines have
    none, if they are not faulty. ``fix``: those of the fix, which is cut last. ``rows``: of a
    table; 0 stands for words in its place. ``details``: also what belongs to single rows of the
    table. ``listed``: the lines of a list. ``notes``: the lines of all notes.
    ``gaps``: the empty lines between the blocks: all three, without that above the fix, only that
    above the table, or none.
    """

    width: int = WIDEST_SCREEN
    code: int = MOST_LINES
    texts: int = 2
    line_notes: int = 2
    bare: int = 0
    fix: int = 2
    rows: int = MOST_ROWS
    details: bool = True
    listed: int = 3
    notes: int = 3
    gaps: int = 3


WHOLE = Shape(
    code=EVERYTHING,
    texts=EVERYTHING,
    line_notes=EVERYTHING,
    fix=EVERYTHING,
    rows=EVERYTHING,
    listed=EVERYTHING,
    notes=EVERYTHING,
)


class Item(Protocol):
    """A part of a block, such as a sentence or a table, which knows how it is cut."""

    def lines(self, shape: Shape) -> Sequence[Line]:
        """Its lines in this shape; none if it has nothing to say."""


@dataclass(frozen=True)
class Block:
    """``gap``: an empty line stands above it if the shape has so many gaps."""

    items: Sequence[Item | Line]
    gap: int = 1


def whole(blocks: Sequence[Block]) -> list[Line]:
    """All that the blocks have to say."""
    return _in_shape(blocks, replace(WHOLE, width=_width()))


def _width() -> int:
    return min(settings.current().width, WIDEST_SCREEN)


def _in_shape(blocks: Sequence[Block], shape: Shape) -> list[Line]:
    lines: list[Line] = []
    for block in blocks:
        of_block: list[Line] = []
        for item in block.items:
            of_block += [item] if isinstance(item, Line) else item.lines(shape)
        if lines and of_block and block.gap <= shape.gaps:
            lines.append(Line(""))
        lines += (replace(line, text=line.text.rstrip()) for line in of_block)
    return lines


def fitted(blocks: Sequence[Block]) -> list[Line]:
    """At most 16 lines of 100 columns; a command may be longer than one."""
    width = _width()
    lines: list[Line] = []
    heads = [item for block in blocks for item in block.items if isinstance(item, Headline)]
    for shape in _shapes(is_named=any(head.is_named for head in heads)):
        lines = _in_shape(blocks, replace(shape, width=width))
        if sum(max(1, -(-len(one.text) // WIDEST_SCREEN)) for one in lines) <= MOST_ROWS_OF_SCREEN:
            break
    return lines


def _shapes(is_named: bool) -> Iterator[Shape]:
    """All shapes that are tried, the largest first. ``is_named``: the difference has a cause."""
    for code in range(MOST_LINES, 0, -1):
        # A whole text is worth more than an empty line, and so is a line of code.
        given_up_last_to_first = (
            *(((2, 2), (1, 2), (1, 1)), (True, False)),
            *((3, 2, 1), range(MOST_ROWS, 1, -1)),
        )
        for (texts, notes), details, gaps, rows in product(*given_up_last_to_first):
            yield Shape(WIDEST_SCREEN, code, texts, notes, rows=rows, details=details, gaps=gaps)
        small = Shape(code=code, texts=1, rows=2, details=False, gaps=0)
        yield small
        yield from (replace(small, line_notes=1, bare=bare) for bare in range(min(code, 2)))
        # Two lines of code are worth more than the table. Where no cause explains the table, all
        # of them are.
        if code == 2 or (code > 2 and not is_named):
            yield from (replace(small, line_notes=1, bare=bare, rows=0) for bare in (0, 1))
    words = Shape(code=1, texts=1, line_notes=1, rows=0)
    yield from (words, replace(words, notes=1), replace(words, fix=1, notes=1, gaps=0))


# The kinds of items. A line is one, too: it is printed as it is.


@dataclass(frozen=True)
class Sentences:
    """Text, which may begin with a label. ``limit``: the field of a shape that cuts it."""

    text: str
    label: str = ""
    limit: Literal["texts", "fix", "line_notes", "notes", "rows"] = "texts"
    indent: str = "  "

    def lines(self, shape: Shape) -> list[Line]:
        most = getattr(shape, self.limit)
        return labelled(self.label, self.text, self.indent, most=most, width=shape.width)


@dataclass(frozen=True)
class Listed:
    """Texts, of which the screen shows the first ones, each cut to a line, and how many more there
    are.
    """

    texts: Sequence[str]

    def lines(self, shape: Shape) -> list[Line]:
        if shape.listed == EVERYTHING:
            return [line for text in self.texts for line in Sentences(text).lines(shape)]
        left_out = len(self.texts) - shape.listed
        more = [f"... and {left_out} more"] if left_out > 0 else []
        shown = (*self.texts[: shape.listed], *more)
        return [Line(cut(f"  {text}", shape.width)) for text in shown]


@dataclass(frozen=True)
class Notes:
    """Sentences that all together take a few lines at most."""

    texts: Sequence[str]

    def lines(self, shape: Shape) -> list[Line]:
        found = [line for text in self.texts for line in Sentences(text).lines(shape)]
        return found[: shape.notes]


@dataclass(frozen=True)
class Headline:
    """The fault, and the name of the cause, which stands at the right, on a line of its own if
    it must; that there is none is said only where there is room for it.
    """

    text: str
    name: str
    is_named: bool

    def lines(self, shape: Shape) -> list[Line]:
        texts = [self.text]
        if len(self.text) + len(self.name) + 2 > shape.width:
            texts = wrapped_at_most(self.text, "", 1 + shape.texts, shape.width)
        room = shape.width - len(texts[-1])
        if self.name and len(self.name) + 2 <= room:
            texts[-1] += self.name.rjust(room)
        elif self.is_named:
            texts.append(self.name.rjust(shape.width))
        return [Line(text, Style.BAD) for text in texts]


@dataclass(frozen=True)
class FirstThatFits:
    """A text on one line if it fits there, or else several texts below each other.

    ``shorter``: the last text with so many characters less, where each may take only one line.
    """

    texts: Sequence[str]
    shorter: Callable[[int], str] | None

    def lines(self, shape: Shape) -> list[Line]:
        together = "  " + " ".join(self.texts)
        if len(together) <= shape.width:
            return [Line(together)] if self.texts else []
        *others, last = self.texts
        too_long = len(last) + 2 - shape.width
        if self.shorter is not None and shape.texts == 1 and too_long > 0:
            last = self.shorter(too_long)
        return [line for text in (*others, last) for line in Sentences(text).lines(shape)]


@dataclass(frozen=True)
class Commands:
    """Labelled commands, on one line if they fit there. None of them is ever broken."""

    texts: Sequence[str]

    def lines(self, shape: Shape) -> list[Line]:
        together = (" " * 5).join(self.texts)
        texts = [together] if len(together) + 2 <= shape.width else self.texts
        return [Line(f"  {text}", Style.LABEL, styled=2 + text.index(":") + 1) for text in texts]


@dataclass(frozen=True)
class Code:
    """Lines of code with place, source and note. Notes stand at the side if all fit there.

    ``choice``: the lines to show where so many at most can be shown.
    """

    choice: Callable[[int], Sequence[PointedLine]]

    def lines(self, shape: Shape) -> list[Line]:
        shown = self.choice(shape.code)
        if not shown:
            return []
        places = [place_name(one.line) for one in shown]
        indent = 2 + max(map(len, places)) + 2
        sources = [cut(source_of(one.line), shape.width - indent) for one in shown]
        noted = [source for source, one in zip(sources, shown, strict=True) if one.note]
        column = indent + max(map(len, noted), default=0) + 2
        at_the_side = all(column + len(one.note) <= shape.width for one in shown)
        lines = []
        for number, (one, place, source) in enumerate(zip(shown, places, sources, strict=True)):
            is_bare = number >= len(shown) - shape.bare and not one.is_fault
            head = f"{'>' if one.is_fault else ' '} {place:<{indent - 4}}  {source}"
            note = "" if is_bare else one.note
            is_short = shape.line_notes < 2 and len(head) + 2 + len(note) <= shape.width
            if at_the_side or is_short:
                head, note = f"{head:<{column if at_the_side else len(head) + 2}}{note}", ""
            lines.append(Line(head))
            if note:
                lines += Sentences(note, "", "line_notes", " " * indent).lines(shape)
            if one.missing:
                missing = f"{'':<{indent}}missing after it: {one.missing}"
                lines.append(Line(cut(missing, shape.width)))
        return lines


# How a line of code is named in a report.

LONGEST_PATH = 30
"""A longer path is shortened to the name of its file."""


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


def defined_at(step: object) -> CodeLine | None:
    """The line that defines the step; None for a name, and for what is not written in Python."""
    # Wrappers may form a cycle, or have nothing to be read.
    with suppress(ValueError, OSError, TypeError, KeyError):
        function: Any = inspect.unwrap(step) if callable(step) else step
        while isinstance(function, functools.partial):
            function = function.func
        if not (isinstance(function, type) or inspect.isroutine(function)):
            function = vars(type(function))["__call__"]  # an object that can be called
        source, first = inspect.getsourcelines(function)  # from its first decorator on
        file, name = inspect.getsourcefile(function), function.__name__
        begins = (n for n, text in enumerate(source) if re.search(rf"(def|class) {name}\b", text))
        return CodeLine(file or "", first + next(begins, 0), name)
    return None


def source_of(line: CodeLine) -> str:
    """The text of the line; "" if the file cannot be read."""
    return linecache.getline(line.file, line.number).strip()
