"""``ddp-equivalence gate``: hold one record against another, red or green with reasons."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, SAME, YELLOW
from ddp_equivalence.commands.output import require_writable_file
from ddp_equivalence.report.text import painted

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "gate",
        help="hold a record against another one: red or green, with reasons",
        description="Say what has changed between two records of `ddp-equivalence record`, such as "
        "under two versions of torch, and whether that is red, yellow or information. Exit code "
        "0: green, 1: red, 2: bad input, 4: yellow, and nothing is red.",
    )
    parser.add_argument(
        "records",
        metavar="RECORD",
        type=Path,
        nargs="+",
        help="the record that was good, and the one to judge; with more of them, the last is "
        "judged, the one before it is what it is held against, and those before it show how much "
        "errors and times vary",
    )
    parser.add_argument(
        "--against-now",
        type=Path,
        metavar="OUT",
        help="record here and now what the last RECORD is of, into this folder, and judge that",
    )
    parser.add_argument("-n", default="0", metavar="N", help="with --against-now, as for `record`")
    parser.add_argument(
        "--observe",
        action="append",
        default=[],
        metavar="COMMAND",
        help="with --against-now: allow this command, which the record has observed, to be run",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="a TOML file that says which findings are red, yellow or information "
        "(docs/upgrades.md)",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="PATH",
        help="add the findings to this file, as for a comment or $GITHUB_STEP_SUMMARY",
    )
    parser.add_argument("--junit", type=Path, metavar="PATH", help="write JUnit XML to this file")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write JSON to this file")
    parser.add_argument(
        "--github",
        action="store_true",
        help="print an annotation for GitHub Actions for each finding that is red",
    )
    parser.add_argument(
        "--full", action="store_true", help="print every finding, and not only the first of a kind"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Raises BadCase for what is no record, or no policy."""
    from ddp_equivalence.commands.record import command
    from ddp_equivalence.gate import outputs
    from ddp_equivalence.gate.judge import judge, read_policy
    from ddp_equivalence.gate.outputs import report
    from ddp_equivalence.gate.record import read_record

    for name in ("markdown", "junit", "json"):
        require_writable_file(name, getattr(arguments, name))
    policy = read_policy(arguments.policy)
    if arguments.against_now is None and len(arguments.records) == 1:
        raise BadCase("RECORD", str(arguments.records[0]), "two records, or one and --against-now")
    records = list(map(read_record, arguments.records))
    if arguments.against_now is not None:
        command.record_again(records[-1], arguments.against_now, arguments.n, arguments.observe)
        records.append(read_record(arguments.against_now))
    for record, path in zip(records, [*arguments.records, arguments.against_now], strict=False):
        if sum(one.name == record.name for one in records) > 1:
            record.name = str(path)
    *earlier, old, new = records
    judgement = judge(old, new, policy, datetime.date.today(), earlier)
    print(painted(report(judgement, arguments.full), sys.stdout), end="")
    for name, write in (
        ("markdown", outputs.write_markdown),
        ("junit", outputs.write_junit),
        ("json", outputs.write_json),
    ):
        if (path := getattr(arguments, name)) is not None:
            write(judgement, path)
    if arguments.github:
        print("\n".join(outputs.github_annotations(judgement)))
    return {"red": DIFFERENT, "yellow": YELLOW}.get(judgement.level, SAME)
