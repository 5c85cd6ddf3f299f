"""SIGTERM ends a command as Ctrl-C does, so that it removes its files and ends its processes."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

SECONDS_TO_END = 20.0
"""A process that is interrupted has so much time to end its own processes."""


class Terminated(KeyboardInterrupt):
    """This process got SIGTERM. Unlike Ctrl-C in a terminal, it reaches no other process."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In the block, SIGTERM raises Terminated, if the program gave it no other meaning."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


def exit_code_of(
    command: Sequence[str],
    at: Path | None = None,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> int:
    """Run a command and wait for it. If this process is interrupted, so is the command.

    ``at``: its folder. ``output``: where all goes that it prints. None: as in this process.
    """
    stderr = None if output is None else subprocess.STDOUT
    with subprocess.Popen(command, cwd=at, env=environment, stdout=output, stderr=stderr) as child:
        try:
            return child.wait()
        except KeyboardInterrupt as interrupted:
            if isinstance(interrupted, Terminated):
                child.send_signal(signal.SIGINT)
            try:
                child.wait(SECONDS_TO_END)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                child.kill()
            raise
