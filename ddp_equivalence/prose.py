"""How sentences of the reports are set."""

from __future__ import annotations

from textwrap import wrap

WIDTH = 96


def plural(count: int, word: str) -> str:
    """The word, with an s unless there is one of it."""
    return word if count == 1 else f"{word}s"


def wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    """The text in lines of at most WIDTH; what follows the first line is indented further."""
    return wrap(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
