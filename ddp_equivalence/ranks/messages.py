"""The messages between the judging process and a rank.

Large arrays are sent after the pickle, straight from their memory, so that nothing copies them.
"""

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
RESULTS, FINISHED, RAISED = "results", "finished", "raised"

SMALL_ARRAY = 4096
"""Arrays of at most this many bytes go into the pickle: a message of their own would cost more."""


@dataclass(frozen=True)
class Finished:
    """The last message of a rank about its work: the last results, and what the work left behind.

    ``same_groups``: the rank's process groups are the same as before the work. ``same_modules``:
    so is what the user's modules hold, perhaps after the rank has restored it. ``not_compared``:
    the user's modules that the work imported and the caller had not compared. ``issued``: the
    number of collectives of the default group that the rank has issued since it started, or None if
    it is not known. ``changed``: the state that the work changed and the rank has since restored.
    ``running``: the threads and processes that the work left running. ``libraries``: those that any
    work has imported so far. ``cpu_seconds``: processor time of the work, of all its threads.
    """

    results: list[object]
    same_groups: bool
    same_modules: bool
    not_compared: tuple[str, ...]
    issued: int | None
    changed: tuple[str, ...]
    running: tuple[str, ...]
    libraries: tuple[str, ...]
    cpu_seconds: float


@dataclass(frozen=True)
class Raised:
    """An exception on a rank, as text, because the exception itself may not be picklable.

    ``at``: seconds of the machine's monotonic clock.
    """

    what: str
    traceback: str
    line: str
    at: float
    last: LastCollective | None


def set_timeout(connection: Connection, seconds: float) -> None:
    """Let a read or a write raise BlockingIOError if no byte gets through for this time.

    That happens if the other process is stopped, or hangs, in the middle of a message.
    """
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            pipe.setsockopt(socket.SOL_SOCKET, direction, limit)


def send(connection: Connection, kind: str, payload: object = None) -> None:
    """Send one message. Raises OSError if the other process is gone."""
    large_arrays: list[memoryview] = []

    def goes_into_pickle(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes > SMALL_ARRAY:
            large_arrays.append(view)
        return view.nbytes <= SMALL_ARRAY

    body = pickle.dumps((kind, payload), protocol=5, buffer_callback=goes_into_pickle)
    connection.send_bytes(pickle.dumps((body, [view.nbytes for view in large_arrays])))
    for view in large_arrays:
        connection.send_bytes(view)


def receive(connection: Connection) -> tuple[str, Any]:
    """Wait for one message and return (kind, payload).

    Raises EOFError or OSError if the other process is gone.
    """
    body, sizes = pickle.loads(connection.recv_bytes())
    large_arrays = []
    for size in sizes:
        array = bytearray(size)
        connection.recv_bytes_into(array)
        large_arrays.append(array)
    kind, payload = pickle.loads(body, buffers=large_arrays)
    return kind, payload
