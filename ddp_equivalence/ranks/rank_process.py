"""One rank as the judging process sees it: its process, two pipes and two files."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as multiprocessing

from ddp_equivalence.case.layouts import RankPlace
from ddp_equivalence.ranks import messages, workers
from ddp_equivalence.ranks.capture_file import CaptureFile
from ddp_equivalence.ranks.join_group import StartArguments
from ddp_equivalence.ranks.process import Channels, main

MAX_SILENCE = 10.0
"""If no byte comes for this many seconds in the middle of a message, its sender counts as hung."""

SHOWN_OUTPUT = 64 * 2**10
"""A report shows at most this many bytes of a rank's output, the last ones."""

MAX_OUTPUT = 32 * 2**20
"""Bytes that a rank may write in one case; more would fill the memory of the machine."""


class RankProcess:
    """One rank. ``process`` is None until ``start()`` has succeeded.

    ``connection`` carries work and results, ``status_connection`` the status thread's requests and
    answers. The rank writes everything that it prints to ``output_file``, and its stacks, when
    asked, to ``stacks_file``.
    """

    def __init__(self, row: RankPlace, method: str) -> None:
        self.row = row
        self.process: Any = None
        self._context: Any = multiprocessing.get_context(method)
        with ExitStack() as opened:
            self.output_file = CaptureFile()
            opened.callback(self.output_file.close)
            self.stacks_file = CaptureFile()
            opened.callback(self.stacks_file.close)
            self._opened = opened.pop_all()
        self.connection: Connection
        self.status_connection: Connection

    def start(self, arguments: StartArguments) -> None:
        """Start the process. Raises OSError if the system cannot start another process."""
        with ExitStack() as rank_sides:
            self.connection, work = self._pipe(rank_sides)
            messages.set_timeout(self.connection, min(MAX_SILENCE, arguments.collective_timeout))
            self.status_connection, status = self._pipe(rank_sides)
            output = rank_sides.enter_context(self.output_file.writer())
            stacks = rank_sides.enter_context(self.stacks_file.writer())
            channels = Channels(work, status, output, stacks)
            process = self._context.Process(target=main, args=(arguments, channels), daemon=True)
            try:
                with workers.children_allowed():
                    process.start()
            except EOFError as error:
                what = "the fork server has ended (too many processes?)"
                raise OSError(errno.EAGAIN, what) from error
            self.process = process

    def _pipe(self, rank_sides: ExitStack) -> tuple[Connection, Connection]:
        own_side, rank_side = self._context.Pipe()
        self._opened.callback(own_side.close)
        return own_side, rank_sides.enter_context(rank_side)

    def is_alive(self) -> bool:
        """True if the process still runs."""
        return self.process is not None and bool(self.process.is_alive())

    def output(self) -> str:
        """The output since the last work was submitted, or its last part if it is long."""
        return self.output_file.read(SHOWN_OUTPUT)

    def wrote_too_much(self) -> bool:
        """True if the rank has written more than ``MAX_OUTPUT``."""
        return self.output_file.size() > MAX_OUTPUT

    def request_stack(self) -> None:
        """Send SIGUSR1, on which the rank's faulthandler writes its stacks to ``stacks_file``."""
        self.stacks_file.clear()
        with suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process and its process group."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(OSError):
            os.kill(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close pipes and files."""
        self._opened.close()
        if self.process is not None:
            with suppress(ValueError):  # not even SIGKILL has ended it
                self.process.close()
