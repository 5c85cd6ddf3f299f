"""The commands of ``ddp-equivalence``. Each is a file or a folder here.

A command has two functions: ``add`` adds its parser, and ``run`` runs it. No command imports torch
before it runs. Bad input raises BadCase.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ddp_equivalence.commands import check, explore, faults, matrix, observe, record, records, run
from ddp_equivalence.commands.doctor import command as doctor
from ddp_equivalence.commands.explain import command as explain
from ddp_equivalence.commands.sandbox import command as sandbox

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    """The collection of parsers to which every command adds its own."""


class Command(NamedTuple):
    """``add`` adds the command's parser. ``run`` runs it and returns the exit code.

    ``arguments.rest``: the arguments that no parser knows. Only the command ``run`` accepts such
    arguments; it hands them to pytest.
    """

    add: Callable[[Commands], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: Mapping[str, Command] = {
    "run": Command(run.add, run.run),
    "check": Command(check.add, check.run),
    "observe": Command(observe.add, observe.run),
    "record": Command(record.add, record.run),
    "gate": Command(records.add_gate, records.run_gate),
    "matrix": Command(matrix.add, matrix.run),
    "report": Command(records.add_report, records.run_report),
    "receipt": Command(records.add_receipt, records.run_receipt),
    "verify-receipt": Command(records.add_verify_receipt, records.run_verify_receipt),
    "explore": Command(explore.add, explore.run),
    "faults": Command(faults.add, faults.run),
    "explain": Command(explain.add, explain.run),
    "sandbox": Command(sandbox.add, sandbox.run),
    "doctor": Command(doctor.add, doctor.run),
}
"""The commands by name, in the order in which --help lists them."""
