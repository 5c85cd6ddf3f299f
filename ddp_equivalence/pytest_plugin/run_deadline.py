"""``pytest --ddp-run-deadline SECONDS``: after this time no test starts, and the run fails."""

from __future__ import annotations

import os
import time

import pytest

END = "DDP_EQUIVALENCE_RUN_UNTIL"
"""The environment variable in which the controller of xdist hands ``end`` to its workers."""


class RunDeadline:
    """Registered for a run with a deadline. ``end``: the deadline by ``time.monotonic()``."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds: float = config.getoption("--ddp-run-deadline")
        is_worker = hasattr(config, "workerinput")
        inherited = os.environ.get(END) if is_worker else None
        self.end = float(inherited) if inherited else time.monotonic() + self._seconds
        if not is_worker:
            os.environ[END] = str(self.end)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.monotonic() <= self.end:
            return None
        item.session.shouldfail = (
            f"--ddp-run-deadline: the {self._seconds:g} s of this run are over"
        )
        return True  # this tells pytest not to run the test itself
