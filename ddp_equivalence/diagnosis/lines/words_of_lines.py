"""Words that the notes beside pointed lines share."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMES = 2


def names_text(names: Sequence[str]) -> str:
    """Names as text: ``0.weight, 0.bias and 4 more``."""
    shown = list(names[:MOST_NAMES]) if len(names) != MOST_NAMES + 1 else list(names)
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
