"""SIGTERM and SIGHUP end a command as Ctrl-C does: it removes its files and ends its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""What ends a command: a CI job that is cancelled, and a terminal that is closed."""

SECONDS_TO_END = 20.0
"""A process that is interrupted has so much time to end its own processes."""


class Terminated(KeyboardInterrupt):
    """This process got one of ``SIGNALS``."""


@dataclass
class Interruption:
    """``terminated``: a signal has come, whoever has caught its error since."""

    terminated: bool = False


@contextmanager
def sigterm_interrupts() -> Iterator[Interruption]:
    """In the block, ``SIGNALS`` raise Terminated, where the program gave them no other meaning.

    Further ones are ignored, since the first one is being followed: ``timeout`` sends two. In a
    fork of this process, such as a worker of the user's, they mean what they mean elsewhere.
    """
    found, here = Interruption(), os.getpid()
    is_main = threading.current_thread() is threading.main_thread()
    ours = [one for one in SIGNALS if is_main and signal.getsignal(one) is signal.SIG_DFL]

    def terminate(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != here:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not found.terminated:
            found.terminated = True
            raise Terminated

    for one in ours:
        signal.signal(one, terminate)
    try:
        yield found
    finally:
        if not found.terminated:  # else what follows cleans up
            for one in ours:
                signal.signal(one, signal.SIG_DFL)


def _hear_interrupts() -> None:
    """A process that a shell has started in the background ignores them, and so would its child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def exit_code_of(
    command: Sequence[str],
    at: Path | None = None,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    seconds_to_end: float = SECONDS_TO_END,
) -> int:
    """Run a command and wait for it. If this process is interrupted, so is the command.

    It has a process group of its own: a signal to the group of this process, as from Ctrl-C or from
    ``timeout``, would otherwise reach it a second time, or end it before it can clean up. ``at``:
    its folder. ``output``: where all goes that it prints. None: as in this process.
    ``seconds_to_end``: it is killed then.
    """
    with subprocess.Popen(
        command,
        cwd=at,
        env=environment,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        process_group=0,
        preexec_fn=_hear_interrupts,
    ) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(seconds_to_end)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                child.kill()
            raise
