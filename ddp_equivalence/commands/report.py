"""``ddp-equivalence report``: a page about one or several records."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_equivalence.commands.exit_codes import SAME
from ddp_equivalence.commands.output import require_writable_file

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "report",
        help="write a page about records: what was compared, what fails, what has changed",
        description="Write one HTML file, which needs no network: what was compared, the report of "
        "every check that is not as expected, with shares and errors, and what has changed from "
        "each record to the next.",
    )
    parser.add_argument(
        "records", metavar="RECORD", nargs="+", type=Path, help="records, the oldest first"
    )
    parser.add_argument(
        "--html", type=Path, required=True, metavar="PATH", help="the file to write"
    )
    parser.add_argument("--policy", type=Path, metavar="FILE", help="as for `gate`")


def run(arguments: argparse.Namespace) -> int:
    """Write the page. Raises BadCase for what is no record."""
    from ddp_equivalence.gate.judge import read_policy
    from ddp_equivalence.gate.page import write_page
    from ddp_equivalence.gate.record import read_record

    require_writable_file("html", arguments.html)
    policy = read_policy(arguments.policy)
    records = [read_record(path) for path in arguments.records]
    write_page(records, policy, datetime.date.today(), arguments.html)
    print(f"The page is {arguments.html}")
    return SAME
