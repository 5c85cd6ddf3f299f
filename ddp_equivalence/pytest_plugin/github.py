"""``pytest --ddp-github``: an annotation of GitHub Actions for every failing check."""

from __future__ import annotations

import pytest

from ddp_equivalence.pytest_plugin.run_results import RunResults
from ddp_equivalence.report.github import annotation
from ddp_equivalence.report.record import Record


def write(terminal: pytest.TerminalReporter, results: RunResults) -> None:
    """Print the annotations, each on a line of its own, where GitHub reads them."""
    for record in results.records:
        if record.report and _has_failed(record):
            terminal.line(annotation(record.file, record.line, record.headline, record.report))


def _has_failed(record: Record) -> bool:
    """True if the test of this check failed because of it."""
    if record.known:
        return not record.confirmed
    return record.outcome != record.expected
