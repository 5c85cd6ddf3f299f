"""A line below pytest's own output that says how far the run is. It is shown on a terminal only.

It stands one row below the row that pytest writes to. It is erased before pytest writes anything,
so that nothing of it remains between pytest's lines. It moves the cursor by control sequences of
ECMA-48, which every terminal has that calls itself other than "dumb".
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import pytest

from ddp_equivalence.pytest_plugin.suite_run.plan import PlannedTest
from ddp_equivalence.pytest_plugin.suite_run.time_needed import (
    Timings,
    duration_text,
    seconds_of,
)

ERASE_ROW, UP = "\033[2K", "\033[A"

LEAST_SECONDS = 10.0
"""After so many seconds the time that is left follows from the pace of this run."""


def can_show(config: pytest.Config) -> bool:
    """True if the output of this run has room for the line.

    It has none if it is no terminal, if the user asked for less (``-q``), or if the output of the
    tests stands between pytest's lines (``-s``, live logs).
    """
    return (
        sys.stdout.isatty()
        and not config.pluginmanager.is_blocked("terminalreporter")
        and os.environ.get("TERM", "dumb") != "dumb"
        and config.option.verbose >= 0
        and config.getoption("capture") != "no"
        and not (config.getoption("log_cli_level") or config.getini("log_cli"))
    )


class Pace:
    """Counts tests, and says how much time is left."""

    def __init__(self, tests: Sequence[PlannedTest], timings: Timings, workers: int) -> None:
        self._lanes = {test.id: test.lane for test in tests}
        self._expected = {test.id: seconds_of(test, timings) for test in tests}
        self._all = sum(self._expected.values())
        self._workers = workers
        self._began = time.monotonic()
        self._done: set[str] = set()
        self._seconds_done = 0.0

    def finished(self, test_id: str) -> None:
        if test_id not in self._done:
            self._done.add(test_id)
            self._seconds_done += self._expected.get(test_id, 0.0)

    def text(self, test_id: str) -> str:
        """How far the run is while this test runs."""
        parts = [f"{len(self._done)} of {len(self._lanes)} tests"]
        if lane := self._lanes.get(test_id):
            parts.append(f"lane {lane}")
        if self._done:
            parts.append(f"about {duration_text(self._seconds_left())} left")
        return ", ".join(parts)

    def _seconds_left(self) -> float:
        left = max(0.0, self._all - self._seconds_done)
        spent = time.monotonic() - self._began
        if spent < LEAST_SECONDS or not self._seconds_done:
            return left / self._workers
        return left * spent / self._seconds_done


class ProgressLine:
    """Registered as a plugin: keeps the line up to date. ``pace`` is set once tests are known."""

    def __init__(self, config: pytest.Config) -> None:
        self.pace: Pace | None = None
        self._config = config
        self._stream = sys.stdout  # what pytest writes to; it replaces sys.stdout later
        self._shown = ""
        self._is_drawn = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logstart(self, nodeid: str) -> Generator[None, object, object]:
        with self.hidden():
            result = yield
            if self.pace is not None:
                self._shown = self.pace.text(nodeid)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self) -> Generator[None, object, object]:
        with self.hidden():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> Generator[None, object, object]:
        if self.pace is not None:
            self.pace.finished(nodeid)
        with self.hidden():
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.end()

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        self.end()

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self) -> None:
        self.end()

    def end(self) -> None:
        """Erase the line and show it no more."""
        self._erase()
        self._shown = ""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside the block the line is gone, and others may write."""
        self._erase()
        try:
            yield
        finally:
            self._draw()

    def _draw(self) -> None:
        if self._shown and not self._is_drawn:
            # A longer line would take two rows.
            text = self._shown[: self._config.get_terminal_writer().fullwidth - 1]
            self._write_below(f"{ERASE_ROW}{text}")
            self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._write_below(ERASE_ROW)
            self._is_drawn = False

    def _write_below(self, text: str) -> None:
        """Write to the row below and return to where pytest goes on writing."""
        writer = self._config.get_terminal_writer()
        column = writer.width_of_current_line % writer.fullwidth + 1
        self._stream.write(f"\n{text}{UP}\033[{column}G")
        self._stream.flush()
