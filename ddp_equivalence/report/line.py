"""One line of output, and the style in which a terminal shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ddp_equivalence.report.wrapping import wrapped


class Style(Enum):
    """What a line is. Whoever prints the line chooses the colour."""

    PLAIN = "plain"
    LABEL = "label"
    GOOD = "good"
    BAD = "bad"
    UNCERTAIN = "uncertain"


@dataclass(frozen=True)
class Link:
    """A part of a line that names a line of code. ``text``: that part, as it is printed."""

    text: str
    file: str
    number: int


@dataclass(frozen=True)
class Line:
    """``style`` applies to the first ``styled`` characters of the text; if None, to all of it.

    ``link``: a part of the text that a terminal can open.
    """

    text: str
    style: Style = Style.PLAIN
    styled: int | None = None
    link: Link | None = None


def paragraph(text: str, indent: str, first: str | None = None) -> list[Line]:
    """The text in plain lines; ``indent`` and ``first`` are those of ``wrapped``."""
    return [Line(line) for line in wrapped(text, indent, first)]


def labelled(label: str, text: str, indent: str = "  ") -> list[Line]:
    """A paragraph that begins with a label, such as ``Case:``. Spaces at its end are kept."""
    first, *more = wrapped(f"{label}{text}", indent)
    return [
        Line(first, Style.LABEL, styled=len(indent) + len(label.rstrip())),
        *(Line(line) for line in more),
    ]
