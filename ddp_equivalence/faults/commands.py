"""What ``ddp-equivalence faults`` prints, and its exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddp_equivalence.catalogue import LAYOUTS
from ddp_equivalence.faults import FAULTS, table
from ddp_equivalence.faults.plant import fault_of
from ddp_equivalence.faults.sensitivity import sensitivities
from ddp_equivalence.faults.trials import fault_trials
from ddp_equivalence.layouts import parse


def list_faults() -> int:
    """Every fault and what it breaks."""
    for fault in FAULTS.values():
        print(f"{fault.name}\n    {fault.sentence}")
    return 0


def print_table(names: Sequence[str], layouts: Sequence[str] | None, every: bool) -> int:
    """Plant them, with progress on the way; 0 if all that show are caught and named.

    Interrupted, it prints the table of what was planted until then. Raises BadCase for an unknown
    fault or layout.
    """
    for name in names:
        fault_of(name)
    for layout in layouts or ():
        parse(layout)
    trials = fault_trials(names, tuple(layouts or LAYOUTS), every)
    found: list[table.Planting] = []
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
    return 130 if interrupted else int(not all(one.good for one in found))


def _progress(one: table.Planting, done: int, count: int) -> None:
    """One line, overwritten on a terminal; else only what went wrong."""
    if sys.stderr.isatty():
        print(f"\r{done} of {count}  {one.what.fault.name:<40}", end="", file=sys.stderr)
    elif not one.good:
        print(f"{one.outcome}: {one.what}", file=sys.stderr)


def print_sensitivity() -> int:
    """The smallest fault of two kinds that is caught, by type."""
    print(f"{'dtype':<10}{'factor 1 +':>14}{'one element':>14}   (smallest caught, powers of two)")
    for one in sensitivities():
        name = str(one.dtype).removeprefix("torch.")
        print(f"{name:<10}{one.factor:>14.1e}{one.element:>14.1e}", flush=True)
    return 0
