"""Scripts that these tests run in forks of one interpreter: nothing else is said of them."""

from __future__ import annotations

import sys

from ddp_equivalence import observe
from tests.package.observed_scripts.observing import SCRIPTS, observed


def test_a_fork_gives_what_an_interpreter_gives_that_was_started() -> None:
    words = ("classifier.py", "clip")
    command = (sys.executable, *words, "--nprocs", "2")
    with_processes = observe(command, folder=SCRIPTS)
    assert with_processes.verdicts
    assert without_seconds(str(observed(*words))) == without_seconds(str(with_processes))


def without_seconds(report: str) -> list[str]:
    return [line for line in report.splitlines() if not line.strip().startswith("Seconds:")]
