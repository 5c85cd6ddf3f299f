"""The commands of ``ddp-equivalence``, one a file: ``add`` its arguments, ``run`` it.

None imports torch before it runs. An exit code is returned; bad input raises BadCase.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ddp_equivalence.commands import check, run
from ddp_equivalence.commands.doctor import command as doctor
from ddp_equivalence.commands.explain import command as explain
from ddp_equivalence.commands.explore import command as explore
from ddp_equivalence.commands.faults import command as faults
from ddp_equivalence.commands.sandbox import command as sandbox

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    """What a command's parser is added to."""


class Command(Protocol):
    """A module of this folder. ``known.rest``: arguments for others; only ``run`` takes any."""

    def add(self, commands: Commands) -> None:
        """Add the command's parser."""

    def run(self, known: argparse.Namespace) -> int:
        """Do it, and return the exit code."""


COMMANDS: Mapping[str, Command] = {
    "run": run,
    "check": check,
    "explore": explore,
    "faults": faults,
    "explain": explain,
    "sandbox": sandbox,
    "doctor": doctor,
}
"""As they are listed by --help."""
