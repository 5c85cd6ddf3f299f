"""The script's end of the socket over which a replay is asked questions."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from ddp_equivalence.observed_scripts.query import Answer, Query

MOST_TIMES = 64
"""A query is given again so often, if the script does not step with it."""

LEFT_OUT = "the script read them, and did not step with them"


class QuestionLine:
    """``path``: of the socket, at which the judging process listens. The first use connects, so
    that processes which compute nothing, such as launchers, are silent.

    ``answered``: the number of answers that were sent.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.folder = Path(path).parent
        self.answered = 0
        self._socket: socket.socket | None = None
        self._only: Query | None = None
        self._times = 0

    def close(self) -> None:
        """Leave the connection to another process."""
        if self._socket is not None:
            self._lines.close()
            self._socket.close()

    def asked_only_over(self, connection: socket.socket) -> Query:
        """The query that comes over this connection: the only one to answer from now on."""
        self._socket, self._lines = connection, connection.makefile("r", encoding="utf-8")
        self._only = Query.from_json(self._read())
        return self._only

    def next_query(self) -> Query | None:
        """Wait for the next query; None if there is none any more.

        A loader that reads ahead asks before it has answered the query before. If there is no
        other one yet, it is given the same again; of several answers the first one counts.
        """
        if self._only is not None:
            self._times += 1
            if self._times > MOST_TIMES:
                self.refuse(LEFT_OUT)
            return self._only
        self._send(f"next {self.answered}")
        text = self._read()
        return Query.from_json(text) if text else None

    def answer(self, answer: Answer) -> None:
        """Send an answer."""
        self._send(f"answer {answer.to_json()}")
        self.answered += 1
        if self._only is not None and answer.number == self._only.number:
            end_process()

    def refuse(self, reason: str) -> NoReturn:
        """Say why the query cannot be answered, and end the process."""
        self._send(f"cannot {' '.join(reason.split())}")
        end_process()

    def _send(self, text: str) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(self._path)
            self._lines = self._socket.makefile("r", encoding="utf-8")
        self._socket.sendall(f"{text}\n".encode())

    def _read(self) -> str:
        return self._lines.readline().strip()


def end_process() -> NoReturn:
    """End this process, which has nothing more to answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
