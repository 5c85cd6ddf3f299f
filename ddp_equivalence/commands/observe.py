"""``ddp-equivalence observe -- COMMAND``: a training script as it is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import cast

from ddp_equivalence.case import settings
from ddp_equivalence.commands.exit_codes import DIFFERENT, EXIT_CODE_OF_OUTCOME, NOT_JUDGED, SAME
from ddp_equivalence.observed_scripts.options import ObserveOptions, add_options
from ddp_equivalence.report.text import painted, require_writable_file

HELP = "run a training script as it is, and replay it as one big batch"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Run a training command on its ranks and record its first optimizer steps. "
        "Then let the same script compute these steps in one process, from the same weights, on "
        "the rows that all ranks read, and compare the gradients. "
        "Exit code 0: same, 1: different, 2: bad input, 3: could not be judged."
    )
    parser.add_argument(
        "training",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="the command that trains, such as -- torchrun --nproc-per-node 2 train.py",
    )
    add_options(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to PATH too")
    for name, text in (
        ("--plan", "only record, and say what one process would be given"),
        ("--strict", "exit with 1 for a warning, too"),
        ("--full", "print all that is known of every step"),
    ):
        parser.add_argument(name, action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Observe the command and print the report."""
    from ddp_equivalence.observed_scripts.ending import ScriptFailed
    from ddp_equivalence.observed_scripts.report import report_lines, write_json
    from ddp_equivalence.observed_scripts.script_observation import observe, plan

    command = arguments.training[arguments.training[:1] == ["--"] :]
    require_writable_file("json", arguments.json)
    given = vars(arguments)
    names = ObserveOptions.__annotations__.keys() & given.keys()
    options = cast(ObserveOptions, {name: given[name] for name in names})
    full = {"full_report": arguments.full, "full_report_with": "--full before the --"}
    with settings.using(settings.replaced(**full)):
        try:
            if arguments.plan:
                lines = plan(command, **options)
                print(painted(lines, sys.stdout), end="")
                return SAME
            observed = observe(command, **options)
        except ScriptFailed as error:
            print(f"unknown: {error}")
            return NOT_JUDGED
        print(painted(report_lines(observed, arguments.full), sys.stdout), end="")
        if arguments.json is not None:
            write_json(observed, arguments.json)
    if arguments.strict and observed.outcome == "same" and observed.warnings:
        return DIFFERENT
    return EXIT_CODE_OF_OUTCOME[observed.outcome]
