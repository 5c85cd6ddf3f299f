"""``ddp-equivalence explore``: try random cases of the suite itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_equivalence.commands.exit_codes import DIFFERENT, SAME
from ddp_equivalence.commands.results import look_at_file, write_json
from ddp_equivalence.ranks.server import start_early

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands


def add(commands: Commands) -> None:
    """Add the command's parser."""
    explore = commands.add_parser(
        "explore",
        help="try random cases of the suite itself",
        description="Try random cases on which the suite promises the big batch, and shrink each "
        "false alarm to its smallest case. Exit code 0: no false alarm, 1: false alarms.",
    )
    explore.add_argument(
        "--right", type=int, default=2000, metavar="N", help="try N right cases (default 2000)"
    )
    explore.add_argument(
        "--wrong", type=int, default=0, metavar="N", help="also try N known differences"
    )
    explore.add_argument("--seed", type=int, default=0, help="draw other cases")
    explore.add_argument("--json", type=Path, metavar="PATH", help="write machine-readable results")


def run(known: argparse.Namespace) -> int:
    """Search, and print the results."""
    look_at_file("json", known.json)
    start_early()
    return SAME if explored(known.right, known.wrong, known.seed, known.json) else DIFFERENT


def explored(right: int, wrong: int = 0, seed: int = 0, results: Path | None = None) -> bool:
    """Try random trials of the suite; return True if the suite judged all of them rightly."""
    from ddp_equivalence.commands.explore import suite_report, suite_search

    search = suite_search.search(right, wrong, seed, progress=_print)
    _print("")
    for line in suite_report.report_lines(search):
        _print(line)
    write_json("json", results, suite_report.as_json(search))
    return not (search.false_alarms or search.misses)


def _print(line: str) -> None:
    print(line, flush=True)
