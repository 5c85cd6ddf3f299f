"""The commands of ``ddp-equivalence``. Each is a file or a folder here.

A command has two functions: ``add`` adds its description and its arguments to a parser, and ``run``
runs it. No command imports torch before it runs. Bad input raises BadCase.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ddp_equivalence.commands import (
    check,
    explore,
    faults,
    matrix,
    observe,
    record,
    records,
    run,
    simulate,
)
from ddp_equivalence.commands.doctor import command as doctor
from ddp_equivalence.commands.explain import command as explain
from ddp_equivalence.commands.sandbox import command as sandbox


class Command(NamedTuple):
    """``add`` adds to the command's parser. ``run`` runs it and returns the exit code.

    ``arguments.rest``: the arguments that no parser knows. Only the command ``run`` accepts such
    arguments; it hands them to pytest. ``help``: the line about it in --help.
    """

    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    help: str


COMMANDS: Mapping[str, Command] = {
    "run": Command(run.add, run.run, run.HELP),
    "check": Command(check.add, check.run, check.HELP),
    "observe": Command(observe.add, observe.run, observe.HELP),
    "record": Command(record.add, record.run, record.HELP),
    "gate": Command(records.add_gate, records.run_gate, records.GATE),
    "matrix": Command(matrix.add, matrix.run, matrix.HELP),
    "report": Command(records.add_report, records.run_report, records.REPORT),
    "receipt": Command(records.add_receipt, records.run_receipt, records.RECEIPT),
    "verify-receipt": Command(
        records.add_verify_receipt, records.run_verify_receipt, records.VERIFY_RECEIPT
    ),
    "explore": Command(explore.add, explore.run, explore.HELP),
    "faults": Command(faults.add, faults.run, faults.HELP),
    "simulate": Command(simulate.add, simulate.run, simulate.HELP),
    "explain": Command(explain.add, explain.run, explain.HELP),
    "sandbox": Command(sandbox.add, sandbox.run, sandbox.HELP),
    "doctor": Command(doctor.add, doctor.run, doctor.HELP),
}
"""The commands by name, in the order in which --help lists them."""
