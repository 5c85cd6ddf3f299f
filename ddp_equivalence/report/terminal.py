"""The terminal that a report is printed on: its width, and whether it shows colours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import TextIO

from ddp_equivalence.report.line import Line, Style

NARROWEST, WIDEST = 72, 140
"""Columns between which a report reads well."""

RED, GREEN, YELLOW, BOLD, PLAIN = "\033[31;1m", "\033[32;1m", "\033[33;1m", "\033[1m", "\033[0m"

COLOURS = {
    Style.BAD: RED,
    Style.GOOD: GREEN,
    Style.UNCERTAIN: YELLOW,
    Style.LABEL: BOLD,
}


def width_of(stream: TextIO | None, otherwise: int) -> int:
    """The columns of the terminal that the stream writes to; ``otherwise`` if it is no terminal.

    A stream that the caller has closed is None.
    """
    if stream is None or not stream.isatty():
        return otherwise
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def painted(lines: Iterable[Line], stream: TextIO) -> str:
    """The text of the lines, in colours if the stream writes to a terminal that shows them.

    Source of ``NO_COLOR``: no-color.org.
    """
    no_colours = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    colours = {} if no_colours or not stream.isatty() else COLOURS
    return "".join(f"{_painted(line, colours.get(line.style))}\n" for line in lines)


def _painted(line: Line, colour: str | None) -> str:
    if colour is None:
        return line.text
    end = len(line.text) if line.styled is None else line.styled
    return f"{colour}{line.text[:end]}{PLAIN}{line.text[end:]}"
