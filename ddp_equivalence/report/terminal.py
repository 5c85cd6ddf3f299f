"""The terminal that a report is printed on: its width, and whether it shows colours."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable
from typing import TextIO
from urllib.parse import quote

from ddp_equivalence.report.line import Line, Link, Style

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
    """The text of the lines, with colours and links if the stream writes to a terminal.

    Source of ``NO_COLOR``: no-color.org.
    """
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return "".join(f"{line.text}\n" for line in lines)
    colours = {} if os.environ.get("NO_COLOR") else COLOURS
    return "".join(f"{_painted(line, colours.get(line.style))}\n" for line in lines)


def _painted(line: Line, colour: str | None) -> str:
    end = len(line.text) if line.styled is None else line.styled
    head, rest = line.text[:end], line.text[end:]
    if line.link is not None:  # before the colours, which the text of the link does not hold
        link = line.link
        if link.text in head:
            head = head.replace(link.text, _linked(link), 1)
        else:
            rest = rest.replace(link.text, _linked(link), 1)
    return f"{head}{rest}" if colour is None else f"{colour}{head}{PLAIN}{rest}"


def _linked(link: Link) -> str:
    """The text as a hyperlink to the line of the file, as the sequence OSC 8 writes it."""
    address = f"file://{socket.gethostname()}{quote(os.path.abspath(link.file))}#{link.number}"
    return f"\033]8;;{address}\033\\{link.text}\033]8;;\033\\"
