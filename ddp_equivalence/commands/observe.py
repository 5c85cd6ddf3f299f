"""``ddp-equivalence observe -- COMMAND``: a training script as it is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ddp_equivalence.case import settings
from ddp_equivalence.commands.exit_codes import DIFFERENT, EXIT_CODE_OF_OUTCOME, NOT_JUDGED, SAME
from ddp_equivalence.report.text import painted, require_writable_file

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "observe",
        help="run a training script as it is, and replay it as one big batch",
        description="Run a training command on its ranks and record its first optimizer steps. "
        "Then let the same script compute these steps in one process, from the same weights, on "
        "the rows that all ranks read, and compare the gradients. "
        "Exit code 0: same, 1: different, 2: bad input, 3: could not be judged.",
    )
    parser.add_argument(
        "training",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="the command that trains, such as -- torchrun --nproc-per-node 2 train.py",
    )
    _add_options_of_the_runs(parser)
    _add_other_options(parser)


def _add_options_of_the_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="record N optimizer steps; default 3"
    )
    parser.add_argument(
        "--from-step",
        type=int,
        default=0,
        metavar="N",
        help="let N optimizer steps pass before the first one that is recorded; default 0",
    )
    parser.add_argument(
        "--one-process",
        metavar="COMMAND",
        help="the command that trains in one process, quoted as one argument; by default the "
        "number of processes in COMMAND is replaced by 1",
    )
    parser.add_argument(
        "--flat",
        metavar="COMMAND",
        help="a command that trains in one process without gradient accumulation, quoted as one "
        "argument: it computes every step once more, with all of its rows as one batch",
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "float64", "own"),
        default="auto",
        help="float64 shows faults far above rounding; own keeps the precision of the script; "
        "auto (the default) takes float64 unless the script fails in it",
    )
    parser.add_argument(
        "--no-dropout",
        dest="dropout",
        action="store_false",
        help="let the script drop nothing, in both runs",
    )
    parser.add_argument(
        "--as-cpu",
        type=int,
        nargs="?",
        const=-1,
        default=0,
        metavar="N",
        help="run a script that needs CUDA on the CPU: N CUDA devices (default: as many as the "
        "command starts processes) are the CPU, and NCCL is gloo",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="the time that recording may take, and each step in one process; default 600",
    )


def _add_other_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plant",
        default="",
        metavar="FAULT",
        help="plant a known fault in the ranks, to see that it is found",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the first step that differs to DIR, as files that stand alone",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the recordings and outputs in DIR"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to PATH too")
    for name, text in (
        ("--in-place", "run in this folder, and not in a copy of it that is made of links"),
        ("--plan", "only record, and say what one process would be given"),
        ("--strict", "exit with 1 for a warning, too"),
        ("--full", "print all that is known of every step"),
    ):
        parser.add_argument(name, action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Observe the command and print the report."""
    from ddp_equivalence.observed_scripts.recording import ScriptFailed
    from ddp_equivalence.observed_scripts.report import report_lines, write_json
    from ddp_equivalence.observed_scripts.script_observation import observe, plan
    from ddp_equivalence.observed_scripts.told import ObserveOptions

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
