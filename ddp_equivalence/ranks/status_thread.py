"""A thread on every rank that answers the judging process even while the rank's work hangs.

It reports the rank's last collective. It cannot answer while something holds Python's global
interpreter lock. Stacks do not need this thread: faulthandler writes them on a signal.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from ddp_equivalence.ranks.collectives import LastCollective, last_collective

THREAD_NAME = "ddp_equivalence status"


def start(connection: Connection) -> None:
    """On a rank: answer every request on this connection with the rank's last collective."""

    def answer() -> None:
        with suppress(EOFError, OSError):
            while True:
                connection.recv_bytes()
                connection.send_bytes(pickle.dumps(last_collective()))

    threading.Thread(target=answer, name=THREAD_NAME, daemon=True).start()


def ask(connections: Mapping[int, Connection], seconds: float) -> dict[int, LastCollective | None]:
    """In the judging process: the last collective of every rank that answers within ``seconds``.

    The value is None for a rank that answers but has recorded no collective.
    """
    waiting = {}
    for rank, connection in connections.items():
        with suppress(OSError):
            connection.send_bytes(b"?")
            waiting[connection] = rank
    answers: dict[int, LastCollective | None] = {}
    until = time.monotonic() + seconds
    while waiting and (left := until - time.monotonic()) > 0:
        for ready in wait(list(waiting), left):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            with suppress(EOFError, OSError):
                answers[rank] = pickle.loads(ready.recv_bytes())
    return answers
