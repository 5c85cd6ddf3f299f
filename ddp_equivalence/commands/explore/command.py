"""``ddp-equivalence explore``: try random cases of the suite itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_equivalence.commands.exit_codes import DIFFERENT, SAME
from ddp_equivalence.commands.output import require_writable_file, write_json
from ddp_equivalence.ranks.server import start_early

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands


def add(commands: Commands) -> None:
    """Add the command's parser."""
    explore = commands.add_parser(
        "explore",
        help="try random cases of the suite itself",
        description="Try random cases on which the suite promises the big batch. For each kind of "
        "false alarm, print the smallest case that shows it. Exit code 0: the suite judged every "
        "case rightly or could not tell, 1: it judged some wrongly.",
    )
    explore.add_argument(
        "--right",
        type=int,
        default=2000,
        metavar="N",
        help="try N cases on which the big batch is promised; default 2000",
    )
    explore.add_argument(
        "--wrong",
        type=int,
        default=0,
        metavar="N",
        help="also try N known differences, each of which must be caught under its name; default 0",
    )
    explore.add_argument(
        "--seed", type=int, default=0, help="the seed with which the cases are drawn; default 0"
    )
    explore.add_argument(
        "--json", type=Path, metavar="PATH", help="write the results to this file, as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Try the cases, print the results, and return the exit code."""
    require_writable_file("json", arguments.json)
    start_early()
    return (
        SAME
        if explored(arguments.right, arguments.wrong, arguments.seed, arguments.json)
        else DIFFERENT
    )


def explored(right: int, wrong: int = 0, seed: int = 0, results: Path | None = None) -> bool:
    """Try random trials of the suite; return False if the suite judged one of them wrongly."""
    from ddp_equivalence.commands.explore import suite

    search = suite.search(right, wrong, seed, progress=_print)
    _print("")
    for line in suite.report_lines(search):
        _print(line)
    write_json("json", results, suite.as_json(search))
    return not (search.false_alarms or search.misses)


def _print(line: str) -> None:
    print(line, flush=True)
