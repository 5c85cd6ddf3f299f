"""Sentences of the reports: wrapped to the width of the output, with plurals and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from textwrap import wrap

from ddp_equivalence.case import settings
from ddp_equivalence.comparison.digits import text_of


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
