"""``ddp-equivalence faults``: plant every known fault, and see which are caught and named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, INTERRUPTED, NOT_JUDGED, SAME
from ddp_equivalence.ranks.server import start_early

if TYPE_CHECKING:
    from ddp_equivalence.commands.planting import FaultResult

HELP = "break training in every known way, and see each caught and named"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Plant known faults in real strategies on real ranks, and print which are "
        "caught and named, and whether the report on a step of one's own points at the right line. "
        "Exit code 0: all are caught and named, and all lines are right; 1: some are not; 3: none "
        "can show."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="plant these faults only")
    parser.add_argument(
        "--list", action="store_true", help="only list the faults, and what each of them breaks"
    )
    parser.add_argument(
        "--layout", action="append", help="plant faults on this layout only; may be repeated"
    )
    parser.add_argument(
        "--every",
        action="store_true",
        help="plant each fault with every model, loss and dtype on every layout; takes minutes",
    )
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="instead, print for each dtype the smallest wrong factor on all gradients and the "
        "smallest error of one element that are caught",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return its exit code. Raises BadCase for a fault that is not known."""
    from ddp_equivalence.case.layouts import parse
    from ddp_equivalence.faults import FAULTS
    from ddp_equivalence.faults.plant import fault_named

    for name in arguments.names:
        fault_named(name)
    for layout in arguments.layout or ():
        parse(layout)
    for name in ("names", "layout"):
        if arguments.sensitivity and (given := getattr(arguments, name)):
            right = "left out with --sensitivity, which plants its own faults on its own layout"
            raise BadCase(name, given, right)
    if arguments.list:
        for fault in [FAULTS[name] for name in arguments.names] or FAULTS.values():
            print(f"{fault.name}\n    {fault.sentence}")
        return SAME
    start_early()
    if arguments.sensitivity:
        from ddp_equivalence.commands.planting import sensitivity_lines

        for line in sensitivity_lines():
            print(line, flush=True)
        return SAME
    return _print_table(arguments.names, arguments.layout, arguments.every)


def _print_table(names: Sequence[str], layouts: Sequence[str] | None, every: bool) -> int:
    """Plant these faults, or all if none is named, and print the table of results.

    Returns the exit code. If it is interrupted, it prints the table of the results so far.
    """
    from ddp_equivalence.commands import planting
    from ddp_equivalence.commands.own_steps import lines_right
    from ddp_equivalence.faults.trials import fault_trials
    from ddp_equivalence.strategies.catalogue import LAYOUTS

    trials = fault_trials(names, tuple(layouts or LAYOUTS), every)
    results: list[FaultResult] = []
    lines: dict[str, bool] = {}
    interrupted = False
    try:
        for result in planting.run_fault_trials(trials):
            results.append(result)
            if sys.stderr.isatty():  # one line, which is overwritten
                done = f"{len(results)} of {len(trials)}  {result.fault:<40}"
                print(f"\r{done}", end="", file=sys.stderr)
        lines = lines_right(dict.fromkeys(trial.fault.name for trial in trials))
    except KeyboardInterrupt:
        interrupted = True
    print(file=sys.stderr)
    if interrupted:
        print(f"interrupted: {len(results)} of {len(trials)} planted")
    for line in planting.table_lines(results, lines):
        print(line)
    if interrupted:
        return INTERRUPTED
    if all(result.outcome == "cannot_show" for result in results):
        print("nothing was shown: no fault can show here; plant it on a layout with more ranks")
        return NOT_JUDGED
    as_expected = all(result.as_expected for result in results) and all(lines.values())
    return SAME if as_expected else DIFFERENT
