"""Lines of output, sentences wrapped to its width, and what a terminal or a stream can show."""

from __future__ import annotations

import codecs
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import floor, log10
from pathlib import Path
from textwrap import wrap
from typing import Any, TextIO
from urllib.parse import quote

from ddp_equivalence.case import settings
from ddp_equivalence.comparison.digits import text_of

# Text for an output that may lack some of its characters, such as one that is ASCII only.

INSTEAD = {
    "–": "-",
    "—": "-",
    "…": "...",
    "×": "x",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
}
"""Character -> what an output gets that lacks it. Others are escaped, as in ``\\xe9``."""

HANDLER = "ddp_equivalence.instead"
"""The name of the error handler for ``str.encode`` and streams that does the same."""


def encodable(text: str, stream: object) -> str:
    """The text, with characters replaced that the stream lacks. Nothing is replaced for None."""
    encoding = getattr(stream, "encoding", None)
    if not isinstance(encoding, str) or text.isascii():
        return text
    try:
        return text.encode(encoding, HANDLER).decode(encoding)
    except (LookupError, UnicodeError):
        return text


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if character in INSTEAD:
        return INSTEAD[character], error.start + 1
    one = UnicodeEncodeError(
        error.encoding, error.object, error.start, error.start + 1, error.reason
    )
    escaped: Any = codecs.backslashreplace_errors(one)
    return escaped[0], error.start + 1


codecs.register_error(HANDLER, _replaced)


# Sentences of the reports: wrapped to the width of the output, with plurals and ratios.


def plural(count: int, word: str, more: str = "") -> str:
    """The word for a count of 1; for other counts ``more``, or the word with an s."""
    return word if count == 1 else more or f"{word}s"


def rank_names(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 3``."""
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"


def wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    """The text in lines of at most the run's width.

    ``indent`` stands before the first line, unless ``first`` replaces it there. The other lines are
    indented by two more spaces.
    """
    return wrap(
        text,
        settings.current().width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def ratio_text(ratio: float) -> str:
    """The ratio with as many digits as it takes to see that it is not 1."""
    distance = abs(ratio - 1)
    digits = 3
    if 1e-11 <= distance <= 0.005:
        digits = min(12, 1 - floor(log10(float(text_of(distance, ".3g")))))
    return text_of(ratio, f".{digits}f") if abs(ratio) < 1e4 else text_of(ratio, ".6g")


# Whether results can be written to a path. It is tried, since permissions alone do not tell.

FILE = "a file in a folder that exists and can be written to"
FOLDER = "a folder that can be written to, or that can be made"


def why_no_file(path: Path) -> str:
    """Why no file can be written there; "" if one can. An existing file keeps its content."""
    folder = path.resolve().parent
    if path.is_dir():
        return "it is a folder"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.exists() and not path.is_file():
        # The reader of a pipe would take the end of the attempt for the end of the results.
        return "" if os.access(path, os.W_OK) else "writing is not permitted"
    existed = path.exists()
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def why_no_folder(path: Path) -> str:
    """Why no files can be written to such a folder, which may not exist yet; "" if they can."""
    whole = path.resolve()
    try:
        nearest = next(folder for folder in (whole, *whole.parents) if folder.exists())
        if not nearest.is_dir():
            return f"{nearest} is no folder"
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return ""


# One line of output, and the style in which a terminal shows it.


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


# The terminal that a report is printed on: its width, and whether it shows colours.

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
