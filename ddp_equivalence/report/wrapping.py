"""How sentences of the reports are set."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from textwrap import wrap

from ddp_equivalence.case import settings


def plural(count: int, word: str, more: str = "") -> str:
    """The word, with an s (or ``more`` instead) unless there is one of it."""
    return word if count == 1 else more or f"{word}s"


def of_ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 3``."""
    return f"{plural(len(numbers), 'rank')} {', '.join(map(str, numbers))}"


def wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    """The text in lines of at most the run's width; after the first line indented further."""
    return wrap(
        text,
        settings.current().width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def to_see_that_it_is_not_1(value: float) -> str:
    """With as many digits as it takes to see that it is not 1."""
    off = abs(value - 1)
    digits = 3 if off < 1e-11 or off > 0.005 else min(12, 1 - floor(log10(off)))
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.6g}"
