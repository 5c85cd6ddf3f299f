"""A thread on every rank that still answers while the rank's own work hangs.

It can tell the rank's last collective unless something holds the interpreter's lock; stacks come
through a signal (faulthandler) and need no thread.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from ddp_equivalence.ranks.collectives import LastCollective, last_collective

THREAD = "ddp_equivalence witness"


def start(connection: Connection) -> None:
    """Answer every question on this connection with the rank's last collective."""

    def answer() -> None:
        with suppress(EOFError, OSError):
            while True:
                connection.recv_bytes()
                connection.send_bytes(pickle.dumps(last_collective()))

    threading.Thread(target=answer, name=THREAD, daemon=True).start()


def ask(connections: Mapping[int, Connection], seconds: float) -> dict[int, LastCollective | None]:
    """Rank -> its last collective, of the ranks that answer in time; None if it has none."""
    waiting = {}
    for rank, connection in connections.items():
        with suppress(OSError):
            connection.send_bytes(b"?")
            waiting[connection] = rank
    found: dict[int, LastCollective | None] = {}
    until = time.monotonic() + seconds
    while waiting and (left := until - time.monotonic()) > 0:
        for ready in wait(list(waiting), left):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            with suppress(EOFError, OSError):
                found[rank] = pickle.loads(ready.recv_bytes())
    return found
