"""The scripts of these tests, as ``observe`` is asked about them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ddp_equivalence import observe
from ddp_equivalence.observed_scripts import launch
from ddp_equivalence.observed_scripts.report import Observed
from ddp_equivalence.report.render import line_to_look_at
from tests.package.forks import started

SCRIPTS = Path(__file__).parent / "scripts"


def observed(
    script: str, *words: str, start: Callable[..., Any] = started, **options: object
) -> Observed:
    """The script on two ranks, in forks of one interpreter."""
    command = (sys.executable, script, *words, "--nprocs", "2")
    with patch.object(launch, "start", start):
        return observe(command, folder=SCRIPTS, **options)  # type: ignore[arg-type]


def started_until(event: str) -> Callable[..., Any]:
    """Starts processes in forks. The first start takes until the script has made a file of this
    name in its working folder, and only then its deadline begins.
    """
    has_started = False

    def start(command: Any, cwd: Path, **keywords: Any) -> Any:
        nonlocal has_started
        process = started(command, cwd=cwd, **keywords)
        until = time.monotonic() + 60
        while not (has_started or (Path(cwd) / event).exists()):
            assert process.poll() is None, f"it has ended without {event}"
            assert time.monotonic() < until, f"it does not come to {event}"
            time.sleep(0.01)
        has_started = True
        return process

    return start


def script(row: tuple[Any, ...]) -> str:
    """The file of the command with which a row of parameters begins."""
    return str(row[0].split()[0])


def outcomes(found: Observed) -> list[str]:
    """The outcome of every step."""
    return [verdict.outcome for verdict in found.verdicts]


def source_of_fault(found: Observed) -> str:
    """The line that the report marks."""
    line = line_to_look_at(found.verdict)
    assert line is not None
    return Path(line.file).read_text().splitlines()[line.number - 1].strip()
