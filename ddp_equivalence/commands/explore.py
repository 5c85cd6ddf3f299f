"""``ddp-equivalence explore``: try random cases of the suite itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ddp_equivalence.commands.exit_codes import DIFFERENT, SAME
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.report.text import require_writable_file, write_file

HELP = "try random cases of the suite itself"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Try random cases on which the suite promises the big batch. For each kind of "
        "false alarm, print the smallest case that shows it. Exit code 0: the suite judged every "
        "case rightly or could not tell, 1: it judged some wrongly."
    )
    for name, default, text in (
        ("--right", 2000, "try N cases on which the big batch is promised"),
        ("--wrong", 0, "also try N known differences, which must be caught under their names"),
        ("--seed", 0, "the seed with which the cases are drawn"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text}; default %(default)s"
        )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the results to this file, as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Try the cases, print the results, and return the exit code."""
    require_writable_file("json", arguments.json)
    start_early()
    from ddp_equivalence.commands import exploration

    search = exploration.search_suite(arguments.right, arguments.wrong, arguments.seed)
    print("\n".join(["", *search.report(), "", exploration.closing_line(search)]))
    if arguments.json is not None:
        write_file(arguments.json, json.dumps(exploration.as_json(search), indent=1) + "\n")
    return DIFFERENT if any(one.wrong for one in search.judged.values()) else SAME
