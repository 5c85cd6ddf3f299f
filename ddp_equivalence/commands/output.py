"""The streams of a command: nothing that happens to its output changes what it does.

A character that the output lacks is replaced. If nobody reads on (``| head -1``), or if the disk is
full, the command goes on without output, because its exit code and its files are results too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from ddp_equivalence.report.encoding import HANDLER

STREAMS = ("stdin", "stdout", "stderr")
"""The names in ``sys`` of the streams with the file descriptors 0, 1 and 2."""


class Output:
    """Stands for a stream. ``error``: why it could not be written to, None if it could."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._stop(error)
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._stop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _stop(self, error: OSError) -> None:
        """Send what is still to come, and what the stream holds, nowhere."""
        self.error = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def output() -> Iterator[Output]:
    """Replace the streams in the block. Yields the standard output."""
    _open_closed_streams()
    before = sys.stdout, sys.stderr
    ours = Output(sys.stdout), Output(sys.stderr)
    errors = [_replace_characters(stream) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in ours)
    try:
        yield ours[0]
    finally:
        for stream in ours:
            stream.flush()
        sys.stdout, sys.stderr = before
        for original, handler in zip(before, errors, strict=True):
            if handler is not None:
                _reconfigure(original, handler)


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that the caller has closed.

    Otherwise the next file that is opened gets its number, and is taken for the stream by others.
    """
    for number, name in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # `run` becomes another program
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115, until the end
            setattr(sys, name, stream)


def _replace_characters(stream: TextIO) -> str | None:
    """Let the stream replace what it cannot encode. Returns its error handler, if it has one."""
    if not hasattr(stream, "reconfigure"):
        return None
    before = stream.errors
    _reconfigure(stream, HANDLER)
    return before


def _reconfigure(stream: Any, handler: str) -> None:
    stream.reconfigure(errors=handler)
