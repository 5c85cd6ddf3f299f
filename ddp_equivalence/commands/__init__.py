"""The commands of ``ddp-equivalence``. Each is a file or a folder here.

A command has two functions: ``add`` adds its parser, and ``run`` runs it. No command imports torch
before it runs. Bad input raises BadCase.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ddp_equivalence.commands import check, gate, observe, receipt, report, run, verify_receipt
from ddp_equivalence.commands.doctor import command as doctor
from ddp_equivalence.commands.explain import command as explain
from ddp_equivalence.commands.explore import command as explore
from ddp_equivalence.commands.faults import command as faults
from ddp_equivalence.commands.matrix import command as matrix
from ddp_equivalence.commands.record import command as record
from ddp_equivalence.commands.sandbox import command as sandbox

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    """The collection of parsers to which every command adds its own."""


class Command(Protocol):
    """The functions of every command's module."""

    def add(self, commands: Commands, /) -> None:
        """Add the command's parser."""

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Run the command and return the exit code.

        ``arguments.rest``: the arguments that no parser knows. Only the command ``run`` accepts
        such arguments; it hands them to pytest.
        """


COMMANDS: Mapping[str, Command] = {
    "run": run,
    "check": check,
    "observe": observe,
    "record": record,
    "gate": gate,
    "matrix": matrix,
    "report": report,
    "receipt": receipt,
    "verify-receipt": verify_receipt,
    "explore": explore,
    "faults": faults,
    "explain": explain,
    "sandbox": sandbox,
    "doctor": doctor,
}
"""The commands by name, in the order in which --help lists them."""
