"""Keeps what the user's code prints in this process, so that it does not bury the report."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

MOST_KEPT = 64 * 2**10
"""Characters that are kept of the output, the last ones."""


class KeptOutput(io.TextIOBase):
    """A stream that keeps the end of what is written. ``lines``: how many lines were written."""

    def __init__(self) -> None:
        self.lines = 0
        self._text = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        self._text = (self._text + text)[-MOST_KEPT:]
        return len(text)

    @property
    def text(self) -> str:
        """The last characters that were written."""
        return self._text

    def report(self, full: bool) -> str:
        """What was printed, below a line that says so, or one line that says how much it was.

        "" if nothing was printed.
        """
        if not self._text:
            return ""
        if full:
            return f"Your code printed in this process:\n{self._text}"
        lines = "a line" if self.lines <= 1 else f"{self.lines:,} lines"
        return f"  In this process your code printed {lines}, which --full shows.\n"


@contextmanager
def kept_output(unless: bool) -> Iterator[KeptOutput]:
    """Keep what is printed in the block. If the block raises an error, print it after all.

    ``unless``: keep nothing, because a debugger is to use the streams of this process.
    """
    kept = KeptOutput()
    try:
        with nullcontext() if unless else redirect_stdout(kept):
            yield kept
    except BaseException:
        print(kept.text, end="", file=sys.stderr)
        raise
