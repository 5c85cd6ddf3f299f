"""Text that must fit on one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_equivalence.report.line import Line, paragraph

CUT = "..."

ENDS = (re.compile(r"[.!?](?= )"), re.compile(r";(?= )"), re.compile(r"(?= )"))
"""Where a text may be cut: after a sentence, else after a clause, else after a word."""


def cut(text: str, width: int) -> str:
    """The text, ended with dots where it is too long."""
    return text if len(text) <= width else f"{text[: width - len(CUT)].rstrip()}{CUT}"


def shortened(name: str, most: int) -> str:
    """A name, with dots in its middle where it is too long; its end tells most."""
    if len(name) <= most:
        return name
    head = (most - len(CUT)) // 3
    return f"{name[:head]}{CUT}{name[len(name) - (most - len(CUT) - head) :]}"


def ended(text: str) -> str:
    """The text with a full stop at its end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def range_of_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, ``ranks 0 to 7``."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:6]))
    return f"ranks {shown}{', ...' if len(numbers) > 6 else ''}"


def wrapped_lines(text: str, width: int, most: int, indent: str = "  ") -> list[Line]:
    """The text in at most so many lines.

    Where more would be needed, whole sentences are left out at its end, or clauses, or else words,
    and dots stand for them.
    """
    lines = paragraph(text, indent)
    if len(lines) <= most:
        return lines
    for end in ENDS:
        for found in reversed(list(end.finditer(text))):
            kept = text[: found.end()].rstrip()
            shown = kept if kept.endswith(CUT) else f"{kept} {CUT}"
            lines = paragraph(shown, indent)
            if len(lines) <= most and len(lines[-1].text) <= width:
                return lines
    return [Line(cut(f"{indent}{text}", width))]
