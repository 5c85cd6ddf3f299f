"""What the command line's exploring prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from ddp_equivalence.exploration import suite_text
from ddp_equivalence.exploration.suite_search import search


def explore_suite(right: int, wrong: int, seed: int, results: Path | None) -> int:
    """Try random trials of the suite. Exit code 1 if the suite was wrong on one, else 0."""
    tally = search(right, wrong, seed, tell=_print)
    _print("")
    for line in suite_text.lines(tally):
        _print(line)
    if results is not None:
        results.write_text(json.dumps(suite_text.record(tally), indent=1) + "\n")
    return int(bool(tally.false_alarms or tally.misses))


def _print(line: str) -> None:
    print(line, flush=True)
