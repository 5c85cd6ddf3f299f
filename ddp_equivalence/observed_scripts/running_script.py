"""The script while it runs in one process, and the socket over which it is asked questions."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_equivalence.observed_scripts.launch import Running
from ddp_equivalence.observed_scripts.query import Answer, Query, path_of_kept
from ddp_equivalence.observed_scripts.told import Told

SECONDS_OF_KEPT = 60.0
"""A process that was kept is not asked again if it takes longer to answer."""

CANNOT_HAVE = "one process cannot have the rows of all ranks"

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
        self._connections: dict[socket.socket, bytes] = {}
        self._asks: socket.socket | None = None
        self.first: Query | None = None
        self.answered = 0

    def close(self) -> None:
        """End it for good."""
        self.stop()
        self._listener.close()

    def stop(self) -> None:
        """End it. The next question starts it again."""
        for connection in self._connections:
            connection.close()
        self._connections, self._asks = {}, None
        if self._running is not None:
            self._running.end()
            self._running = None
        for path in Path(self._told.socket).parent.glob("kept*"):
            path.unlink()

    def send(self, query: Query) -> None:
        """Ask it, when it has asked for a query."""
        assert self._asks is not None
        self.first = self.first or query
        self._asks.sendall(f"{query.to_json()}\n".encode())

    def answer_of_kept(self, query: Query) -> Answer | None:
        """The answer of the process that was kept at the beginning of the query's steps; None if
        there is none, or it does not answer. Raises CannotReplay if it cannot have the rows.
        """
        if query.state.is_carried_over:
            return None
        path = path_of_kept(Path(self._told.socket).parent, query.steps)
        try:
            with socket.socket(socket.AF_UNIX) as asked:
                asked.settimeout(min(self._deadline, SECONDS_OF_KEPT))
                asked.connect(str(path))
                asked.sendall(f"{query.to_json()}\n".encode())
                for line in asked.makefile("r"):
                    kind, _, text = line.partition(" ")
                    if kind == "cannot":
                        raise CannotReplay(f"{CANNOT_HAVE}: {text}")
                    if kind == "answer" and json.loads(text)["number"] == query.number:
                        return Answer.from_json(json.loads(text))
        except OSError:
            pass
        path.unlink(missing_ok=True)
        return None

    def wait_until_it_asks(self) -> None:
        """Start it, and let it come to its first question. Raises CannotReplay."""
        line = self.line(time.monotonic())
        if line is not None and self._asks is not None:
            self._connections[self._asks] = f"{line}\n".encode() + self._connections[self._asks]

    def line(self, started: float) -> str | None:
        """Its next line, for which one has waited since ``started``; None if it has ended. Several
        of its processes may ask, such as one that starts the others and wants to know how long a
        loader is: ``send`` answers the one whose line was the last.

        Raises CannotReplay if it takes too long, or has ended without an answer.
        """
        if self._running is None:
            self._start()
        assert self._running is not None
        while True:
            for connection, read in self._connections.items():
                line, end, rest = read.partition(b"\n")
                if end:
                    self._connections[connection], self._asks = rest, connection
                    return line.decode()
            if time.monotonic() - started > self._deadline:
                words = self._running.last_words
                self.stop()
                raise CannotReplay(f"{TOO_SLOW} {self._deadline:g} s; it printed last:\n{words}")
            if not self._reads_on():
                self._require_answers()
                return None

    def _reads_on(self) -> bool:
        """Read what its processes have sent, for a moment; False if none will ask any more."""
        assert self._running is not None
        is_over = self._running.exit_code is not None  # asked first: it may still have sent a line
        ready = select.select([self._listener, *self._connections], [], [], 0.05)[0]
        for source in ready:
            if source is self._listener:
                self._connections[source.accept()[0]] = b""
            elif data := _received(source):
                self._connections[source] += data
            else:
                del self._connections[source]
                source.close()
        may_ask = not self.answered and not is_over  # who has answered and left does not come back
        return bool(self._connections) or may_ask

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


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 20)
    except ConnectionError:  # the process was killed
        return b""
