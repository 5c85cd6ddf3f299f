"""Text that must fit on one line."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.report.line import Line, paragraph

CUT = "..."


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
    """The text in at most so many lines; the last one is cut if more would be needed."""
    lines = paragraph(text, indent)
    if len(lines) <= most:
        return lines
    rest = " ".join(line.text.strip() for line in lines[most - 1 :])
    begin = indent if most == 1 else f"{indent}  "
    return [*lines[: most - 1], Line(cut(f"{begin}{rest}", width))]
