"""``pytest --ddp-run-deadline SECONDS``: then no more tests start, and the run fails."""

from __future__ import annotations

import os
import time

import pytest

END = "DDP_EQUIVALENCE_RUN_UNTIL"
"""Environment variable in which the workers of xdist inherit the end from the controller."""


class RunDeadline:
    """Registered for a run with a deadline. ``end``: its end, on the monotonic clock."""

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
        return True  # pytest takes the test as done
