"""The script while it runs in one process, and the socket over which it is asked questions."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_equivalence.observed_scripts.launch import Running
from ddp_equivalence.observed_scripts.query import Query
from ddp_equivalence.observed_scripts.told import Told

TOO_SLOW = "the script did not compute a step in one process within"


class CannotReplay(Exception):
    """The script does not compute in one process what it computed on the ranks. Says why."""


class RunningScript:
    """``command``: trains in one process. ``at``: the folder to run it in. ``log``: the file for
    what it prints. ``told``: what its processes are told. ``deadline``: the seconds that one answer
    may take. ``answered``: how many queries it has answered since it was started. ``first``: the
    one that it was asked first, since then.
    """

    def __init__(
        self, command: Sequence[str], at: Path, log: Path, told: Told, deadline: float
    ) -> None:
        self._command, self._at, self._log = tuple(command), at, log
        self._told, self._deadline = told, deadline
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(told.socket)
        self._listener.listen()
        self._running: Running | None = None
        self._connection: socket.socket | None = None
        self._buffer = b""
        self.first: Query | None = None
        self.answered = 0

    def close(self) -> None:
        """End it for good."""
        self.stop()
        self._listener.close()

    def stop(self) -> None:
        """End it. The next question starts it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._running is not None:
            self._running.end()
            self._running = None
        self._buffer = b""

    def send(self, query: Query) -> None:
        """Ask it, when it has asked for a query."""
        assert self._connection is not None
        self.first = self.first or query
        self._connection.sendall(f"{query.to_json()}\n".encode())

    def wait_until_it_asks(self) -> None:
        """Start it, and let it come to its first question. Raises CannotReplay."""
        line = self.line(time.monotonic())
        self._buffer = (b"" if line is None else f"{line}\n".encode()) + self._buffer

    def line(self, started: float) -> str | None:
        """Its next line, for which one has waited since ``started``; None if it has ended.

        Raises CannotReplay if it takes too long, or has ended without an answer.
        """
        if self._running is None:
            self._start()
        assert self._running is not None
        while b"\n" not in self._buffer:
            if time.monotonic() - started > self._deadline:
                end = self._running.last_words
                self.stop()
                raise CannotReplay(f"{TOO_SLOW} {self._deadline:g} s; it printed last:\n{end}")
            source = self._connection or self._listener
            if not select.select([source], [], [], 0.05)[0]:
                if self._connection is None and self._running.exit_code is not None:
                    self._require_answers()
                    return None
                continue
            if self._connection is None:
                self._connection = self._listener.accept()[0]
                continue
            data = self._connection.recv(1 << 20)
            if not data:
                self._require_answers()
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def _require_answers(self) -> None:
        if self.answered:
            return
        assert self._running is not None
        end = self._running.last_words_at_its_end()
        given = ""
        if self._told.feed == "calls" and self.first is not None:
            given = (
                ", after its model had been given the rows of all ranks: what the script combines "
                "with them may be of its own rows, since it has no DataLoader"
            )
        raise CannotReplay(
            f"the script ended in one process before it had computed a step{given}; it printed "
            f"last:\n{end}"
        )

    def _start(self) -> None:
        self._running = Running(self._command, self._told, self._at, self._log)
        self.first = None
        self.answered = 0
