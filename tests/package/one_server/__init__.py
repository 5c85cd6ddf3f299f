"""Lets the runs that a test starts use the fork server of the tests.

Every run would otherwise start a server of its own, which imports torch and torch._dynamo for
almost three seconds of processor time. It gets the same ranks: each of them takes environment,
paths, folder and settings from the run that it works for. Tests of the server itself, and those
that change what it imports, leave their runs a server of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from ddp_equivalence.ranks.server import start_server
from tests.package.one_server.sitecustomize import VARIABLE


def with_server_of_these_tests(environment: Mapping[str, str]) -> dict[str, str]:
    """These variables, and those that let a new interpreter use the server of this process."""
    start_server()
    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009  # private, and has no stubs
    paths = [str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])]
    return {
        **environment,
        VARIABLE: os.fsdecode(server._forkserver_address),
        "PYTHONPATH": os.pathsep.join(paths),
    }
