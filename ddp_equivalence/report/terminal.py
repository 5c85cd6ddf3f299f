"""Where a report is printed: how wide, and whether in colours."""

from __future__ import annotations

import os
import re
import shutil
from typing import TextIO

NARROWEST, WIDEST = 72, 140
"""Columns between which a report reads well."""

RED, GREEN, YELLOW, BOLD, PLAIN = "\033[31;1m", "\033[32;1m", "\033[33;1m", "\033[1m", "\033[0m"

OUTCOMES = ((" is not big_batch", RED), (" is big_batch", GREEN), (" against big_batch", YELLOW))

HEADS = re.compile(
    r"^(  (?:Namely|Seen|Look at|Known of it|Whose mean is it\?|Structure|Share of|No shares|Right|"
    r"Parameters that differ|Cannot be told apart|Same numbers|Ruled out|Nearest|Evidence|Planted|"
    r"Case|Repeat|Script|On a closer look)[^:]*:?)",
    re.MULTILINE,
)


def width_of(stream: TextIO, otherwise: int) -> int:
    """Columns of the terminal that this is; ``otherwise`` if it is none."""
    if not stream.isatty():
        return otherwise
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def painted(report: str, stream: TextIO) -> str:
    """The report in colours, if this is a terminal that takes them.

    Source: no-color.org, for ``NO_COLOR``.
    """
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return report
    title, separator, rest = report.partition("\n")
    colour = next((one for words, one in OUTCOMES if words in title), BOLD)
    bold = HEADS.sub(lambda head: f"{BOLD}{head.group()}{PLAIN}", rest)
    return f"{colour}{title}{PLAIN}{separator}{bold}"
