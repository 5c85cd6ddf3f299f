"""Python imports this when it starts, if it is told of a fork server that runs already."""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "DDP_EQUIVALENCE_TESTS_SERVER"
"""The environment variable with the address of the server's socket."""


def _use_the_server(address: str) -> None:
    """Let multiprocessing use this server, wherever it would start one."""
    from multiprocessing import forkserver

    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009

    def runs_already() -> None:
        server._forkserver_address = address
        if server._forkserver_alive_fd is None:  # ranks get a copy, which keeps no server alive
            server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)

    server.ensure_running = forkserver.ensure_running = runs_already


if os.environ.get(VARIABLE) and __name__ == "sitecustomize":
    _use_the_server(os.environ[VARIABLE])
