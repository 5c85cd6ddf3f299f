"""Lines of output, sentences wrapped to its width, and what a terminal or a stream can show."""

from __future__ import annotations

import codecs
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import floor, log10
from pathlib import Path
from textwrap import wrap
from typing import Any, TextIO, TypeVar

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.comparison.digits import text_of

# Text for an output that may lack some of its characters, such as one that is ASCII only.

INSTEAD = dict(
    zip("–—…×±≤≥‘’“”", ("-", "-", "...", "x", "+-", "<=", ">=", *"''", *'""'), strict=True)
)
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


# Words and sentences of the reports: lists, plurals, ranks and ratios, and what fits on a line.

Key = TypeVar("Key")

CUT = "..."

ENDS = (re.compile(r"[.!?](?= )"), re.compile(r";(?= )"), re.compile(r"(?= )"))
"""Where a text may be cut: after a sentence, else after a clause, else after a word."""


def plural(count: int, word: str, more: str = "") -> str:
    """The word for a count of 1; for other counts ``more``, or the word with an s."""
    return word if count == 1 else more or f"{word}s"


def rank_names(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 3``."""
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"


def range_of_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, ``ranks 0 to 7``."""
    numbers = sorted(ranks)
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"{plural(len(numbers), 'rank')} {listed(map(str, numbers), 6)}"


def listed(texts: Iterable[str], most: int) -> str:
    """The first texts, and the number of all others: ``a, b and 3 more``."""
    every = list(texts)
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")


def ranks_by(values: Iterable[tuple[int, Key | None]]) -> dict[Key, list[int]]:
    """Value -> the ranks that have it. ``values``: ranks with their value; None is left out."""
    ranks: dict[Key, list[int]] = {}
    for rank, value in values:
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    return ranks


def ratio_text(ratio: float) -> str:
    """The ratio with as many digits as it takes to see that it is not 1."""
    distance = abs(ratio - 1)
    digits = 3
    if 1e-11 <= distance <= 0.005:
        digits = min(12, 1 - floor(log10(float(text_of(distance, ".3g")))))
    return text_of(ratio, f".{digits}f") if abs(ratio) < 1e4 else text_of(ratio, ".6g")


def ended(text: str) -> str:
    """The text with a full stop at its end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def cut(text: str, width: int) -> str:
    """The text, ended with dots where it is too long."""
    return text if len(text) <= width else f"{text[: width - len(CUT)].rstrip()}{CUT}"


def shortened(name: str, most: int) -> str:
    """A name, with dots in its middle where it is too long; its end tells most."""
    if len(name) <= most:
        return name
    head = (most - len(CUT)) // 3
    return f"{name[:head]}{CUT}{name[len(name) - (most - len(CUT) - head) :]}"


def wrapped(text: str, indent: str, first: str | None = None, hang: int = 2) -> list[str]:
    """The text in lines of at most the run's width.

    ``indent`` stands before the first line, unless ``first`` replaces it there. The other lines are
    indented by ``hang`` more spaces.
    """
    return wrap(
        text,
        settings.current().width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def aligned(rows: Sequence[Sequence[object]], gap: int = 2, narrowest: int = 0) -> list[str]:
    """The lines of a table whose first column is text and whose others are numbers.

    ``gap``: spaces between columns. ``narrowest``: the least width of a column of numbers.
    """
    first, *others = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    widths = [max(width, narrowest) + gap for width in others]
    return [
        f"{head!s:<{first}}"
        + "".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for head, *cells in rows
    ]


EVERYTHING = 10**9


def wrapped_at_most(text: str, indent: str, most: int, width: int, hang: int = 2) -> list[str]:
    """The text in at most so many lines.

    Where more would be needed, whole sentences are left out at its end, or clauses, or else words,
    and dots stand for them.
    """
    lines = wrapped(text, indent, hang=hang)
    if len(lines) <= most:
        return lines
    for end in ENDS:
        for found in reversed(list(end.finditer(text))):
            kept = text[: found.end()].rstrip()
            lines = wrapped(kept if kept.endswith(CUT) else f"{kept} {CUT}", indent, hang=hang)
            if len(lines) <= most and len(lines[-1]) <= width:
                return lines
    return [cut(f"{indent}{text}", width)]


# Files of results: whether a path can be written to, which is tried, and writing to it.


def require_writable_file(field: str, path: Path | None) -> None:
    """Raises BadCase if a path is given and no file can be written there."""
    if path is not None and (reason := _why_no_file(path)):
        right = "a file in a folder that exists and can be written to"
        raise BadCase(field, str(path), f"{right}; {reason}")


def require_writable_folder(field: str, path: Path | None) -> None:
    """Raises BadCase if a path is given that is not a writable folder and cannot become one."""
    if path is not None and (reason := _why_no_folder(path)):
        raise BadCase(field, str(path), f"a folder that can be written to, or be made; {reason}")


def _why_no_file(path: Path) -> str:
    """The reason; "" if a file can be written there. An existing one keeps its content."""
    folder = path.resolve().parent
    if path.is_dir():
        return "it is a folder"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "writing is not permitted"
    return _why_no_folder(folder)


def _why_no_folder(path: Path) -> str:
    """The reason; "" if files can be written to such a folder, which may not exist yet."""
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


class NotWritten(OSError):
    """A file of results could not be written. ``filename`` and ``strerror`` say which, and why."""


def what_is_not_written(error: Exception) -> str:
    """Says in a line which file could not be written, and why; "" if the error is another one."""
    known = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, NotWritten) or (isinstance(error, OSError) and error.errno in known):
        return f"{error.filename or tempfile.gettempdir()} could not be written: {error.strerror}"
    return ""


def write_file(path: Path, content: str | bytes) -> None:
    """Write all of the file, or leave what was there. Raises NotWritten.

    What is no file, such as a pipe or /dev/stdout, is written to as it is.
    """
    place = path.resolve()
    is_as_it_is = path.is_relative_to("/dev") or not os.access(place.parent, os.W_OK)
    is_as_it_is |= path.exists() and not path.is_file()
    beside = path if is_as_it_is else place.with_name(f".{os.getpid()}.part")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        if not is_as_it_is:
            if place.exists():
                shutil.copymode(place, beside)
            beside.replace(place)
    except OSError as error:
        raise NotWritten(error.errno, error.strerror, str(path)) from error
    finally:
        if not is_as_it_is:
            beside.unlink(missing_ok=True)


# One line of output, and the style in which a terminal shows it.


class Style(Enum):
    """The kind of a line. Whoever prints the line chooses the colour."""

    PLAIN = "plain"
    LABEL = "label"
    GOOD = "good"
    BAD = "bad"
    UNCERTAIN = "uncertain"


@dataclass(frozen=True)
class Line:
    """``style`` applies to the first ``styled`` characters of the text; if None, to all of it."""

    text: str
    style: Style = Style.PLAIN
    styled: int | None = None


def paragraph(text: str, indent: str, hang: int = 2) -> list[Line]:
    """The text in plain lines; none for ""."""
    return labelled("", text, indent, hang)


def labelled(
    label: str,
    text: str,
    indent: str = "  ",
    hang: int = 2,
    most: int = EVERYTHING,
    width: int = EVERYTHING,
) -> list[Line]:
    """A paragraph that begins with a label, such as ``Case:``; none without text.

    Spaces at the end of the label are kept. It is cut to ``most`` lines; see ``wrapped_at_most``.
    """
    if not text:
        return []
    first, *more = wrapped_at_most(f"{label}{text}", indent, most, width, hang)
    styled = len(indent) + len(label.rstrip())
    head = Line(first, Style.LABEL, styled) if label else Line(first)
    return [head, *map(Line, more)]


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


def plain_text(lines: Iterable[Line], stream: object) -> str:
    """The text of the lines without colours, which can be printed to the stream."""
    return encodable("".join(f"{line.text}\n" for line in lines), stream)


def painted(lines: Iterable[Line], stream: TextIO) -> str:
    """The text of the lines, with colours if the stream writes to a terminal.

    Source of ``NO_COLOR``: no-color.org.
    """
    is_plain = os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR")
    colours = COLOURS if stream.isatty() and not is_plain else {}
    return "".join(f"{_painted(line, colours.get(line.style))}\n" for line in lines)


def _painted(line: Line, colour: str | None) -> str:
    if colour is None:
        return line.text
    end = len(line.text) if line.styled is None else line.styled
    return f"{colour}{line.text[:end]}{PLAIN}{line.text[end:]}"


# Annotations of GitHub Actions: a line of a log that GitHub shows at a line of a file.
#
# Source: docs.github.com, "Workflow commands for GitHub Actions", and how GitHub's own toolkit
# escapes them.


def annotation(file: str, line: int, title: str, message: str) -> str:
    """``::error file=...,line=...,title=...::message``, on one line."""
    place = [f"file={_property(_from_root(file))}", f"line={line}"] if file else []
    properties = ",".join([*place, f"title={_property(title)}"])
    return f"::error {properties}::{_data(message.strip())}"


def _from_root(file: str) -> str:
    """The path from the root of the repository, which is what GitHub looks for."""
    path = os.path.realpath(file)
    for root in (os.environ.get("GITHUB_WORKSPACE"), os.getcwd()):
        if root and path.startswith(os.path.join(os.path.realpath(root), "")):
            return os.path.relpath(path, os.path.realpath(root)).replace(os.sep, "/")
    return path.replace(os.sep, "/")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
