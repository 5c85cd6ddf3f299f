"""Messages between the judging process and a rank; arrays travel beside the pickle, uncopied."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any

READY, PORT, WORK, STOP = "ready", "port", "work", "stop"
RESULT, FINISHED, RAISED = "result", "finished", "raised"


def send(connection: Connection, kind: str, payload: object = None) -> None:
    """Send one message. Raises OSError if the other side is gone."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps((kind, payload), protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    connection.send_bytes(pickle.dumps((body, [view.nbytes for view in raw])))
    for view in raw:
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
