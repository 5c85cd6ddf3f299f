"""Shows on pytest's terminal how far the explanation of a difference is, if that takes long."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest

from ddp_equivalence.diagnosis.time_left import progress_shown_by

PROGRESS_LINE = "ddp_equivalence_progress_line"
"""The name under which ``ddp-equivalence run`` registers the line that says how far the run is."""


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
        below = config.pluginmanager.get_plugin(PROGRESS_LINE)
        hidden = nullcontext() if below is None else below.hidden()
        with capture.global_and_fixture_disabled(), hidden:
            reporter.ensure_newline()
            reporter.write_line(line)

    return progress_shown_by(show)
