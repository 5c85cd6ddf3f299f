"""Messages between the judging process and a rank; large arrays go beside the pickle, uncopied."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ddp_equivalence.ranks.collectives import LastCollective

READY, PORT, WORK, STOP = "ready", "port", "work", "stop"
SMALL = 4096
"""Bytes of an array up to which copying it costs less than a message of its own."""

RESULTS, FINISHED, RAISED = "results", "finished", "raised"


@dataclass(frozen=True)
class Finished:
    """A rank's last word on its work: the last results, and what it left behind.

    ``same_groups``: its process groups are still those it began with. ``issued``: how many
    collectives of the group of all ranks it has issued in its life, None if that is not known.
    ``changed``: state that the work changed, put back since. ``running``: threads and processes
    that it left running.
    """

    results: list[object]
    same_groups: bool
    issued: int | None
    changed: tuple[str, ...]
    running: tuple[str, ...]


@dataclass(frozen=True)
class Raised:
    """An exception on a rank, as text: the exception itself may not travel.

    ``at``: seconds of the machine's monotonic clock.
    """

    what: str
    traceback: str
    line: str
    at: float
    last: LastCollective | None


def give_up_after(connection: Connection, seconds: float) -> None:
    """Let no read or write take longer in which not a byte moves: then BlockingIOError.

    A process may be stopped, or hang, in the middle of a message.
    """
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, direction, limit)


def send(connection: Connection, kind: str, payload: object = None) -> None:
    """Send one message. Raises OSError if the other side is gone."""
    beside: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes > SMALL:
            beside.append(view)
        return view.nbytes <= SMALL

    body = pickle.dumps((kind, payload), protocol=5, buffer_callback=is_small)
    connection.send_bytes(pickle.dumps((body, [view.nbytes for view in beside])))
    for view in beside:
        connection.send_bytes(view)


def receive(connection: Connection) -> tuple[str, Any]:
    """Wait for one message: (kind, payload). Raises EOFError or OSError if nobody is there."""
    body, sizes = pickle.loads(connection.recv_bytes())
    buffers = []
    for size in sizes:
        buffer = bytearray(size)
        connection.recv_bytes_into(buffer)
        buffers.append(buffer)
    kind, payload = pickle.loads(body, buffers=buffers)
    return kind, payload
