"""Shows on pytest's terminal how far the explanation of a difference is, if that takes long."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from ddp_equivalence.diagnosis.time_left import progress_shown_by


def shown_on_the_terminal(config: pytest.Config) -> AbstractContextManager[None]:
    """Inside the block, progress goes to the terminal, past pytest's capture.

    A worker of xdist has no terminal, and shows nothing.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")

    def show(line: str) -> None:
        if reporter is None:
            return
        if capture is None:  # pytest -p no:capture
            reporter.write_line(line)
            return
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(line)

    return progress_shown_by(show)
