"""``ddp-equivalence faults``: break training in every known way, and see each caught and named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_equivalence.commands.exit_codes import DIFFERENT, INTERRUPTED, SAME
from ddp_equivalence.commands.explore.command import explored
from ddp_equivalence.ranks.server import start_early

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.commands.faults.table import Planting


def add(commands: Commands) -> None:
    """Add the command's parser."""
    faults = commands.add_parser(
        "faults",
        help="break training in every known way, and see each caught and named",
        description="Plant known faults in real strategies on real ranks, and print which are "
        "caught and named, and which other checks would have noticed. Exit code 0: all; 1: not.",
    )
    faults.add_argument("names", nargs="*", metavar="NAME", help="these faults only")
    faults.add_argument("--list", action="store_true", help="say what each fault breaks")
    faults.add_argument("--layout", action="append", help="on this layout only; may be repeated")
    faults.add_argument(
        "--every", action="store_true", help="every model, loss and type on every layout: minutes"
    )
    faults.add_argument(
        "--right",
        type=int,
        default=0,
        metavar="N",
        help="and this many random cases that are right, none of which may be called wrong",
    )
    faults.add_argument(
        "--sensitivity",
        action="store_true",
        help="instead: the smallest factor and wrong element that is caught, by type",
    )


def run(known: argparse.Namespace) -> int:
    """Plant them, and print the table."""
    if known.list:
        return _list_faults()
    start_early()
    if known.sensitivity:
        return _print_sensitivity()
    code = _print_table(known.names, known.layout, known.every)
    if known.right and code == SAME:
        code = SAME if explored(known.right) else DIFFERENT
    return code


def _list_faults() -> int:
    from ddp_equivalence.faults import FAULTS

    for fault in FAULTS.values():
        print(f"{fault.name}\n    {fault.sentence}")
    return SAME


def _print_table(names: Sequence[str], layouts: Sequence[str] | None, every: bool) -> int:
    """Plant them, with progress on the way; 0 if all that show are caught and named.

    Interrupted, it prints the table of what was planted until then. Raises BadCase for an unknown
    fault or layout.
    """
    from ddp_equivalence.case.layouts import parse
    from ddp_equivalence.commands.faults import table
    from ddp_equivalence.faults.plant import fault_of
    from ddp_equivalence.faults.trials import fault_trials
    from ddp_equivalence.strategies.catalogue import LAYOUTS

    for name in names:
        fault_of(name)
    for layout in layouts or ():
        parse(layout)
    trials = fault_trials(names, tuple(layouts or LAYOUTS), every)
    found: list[Planting] = []
    interrupted = False
    try:
        for one in table.plant_all(trials):
            found.append(one)
            _progress(one, len(found), len(trials))
    except KeyboardInterrupt:
        interrupted = True
    print(file=sys.stderr)
    if interrupted:
        print(f"interrupted: {len(found)} of {len(trials)} planted")
    for line in table.lines(found):
        print(line)
    if interrupted:
        return INTERRUPTED
    return SAME if all(one.good for one in found) else DIFFERENT


def _progress(one: Planting, done: int, count: int) -> None:
    """One line, overwritten on a terminal; else only what went wrong."""
    if sys.stderr.isatty():
        print(f"\r{done} of {count}  {one.what.fault.name:<40}", end="", file=sys.stderr)
    elif not one.good:
        print(f"{one.outcome}: {one.what}", file=sys.stderr)


def _print_sensitivity() -> int:
    """The smallest fault of two kinds that is caught, by type."""
    from ddp_equivalence.commands.faults.sensitivity import sensitivities

    print(f"{'dtype':<10}{'factor 1 +':>14}{'one element':>14}   (smallest caught, powers of two)")
    for one in sensitivities():
        name = str(one.dtype).removeprefix("torch.")
        print(f"{name:<10}{one.factor:>14.1e}{one.element:>14.1e}", flush=True)
    return SAME
