"""The commands of ``ddp-equivalence``, one a file or folder: ``add`` its arguments, ``run`` it.

No command imports torch before it runs. Bad input raises BadCase.
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
    """A command adds its own parser to this."""


class Command(Protocol):
    """A module of this folder."""

    def add(self, commands: Commands, /) -> None:
        """Add the command's parser."""

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Run the command and return the exit code.

        ``arguments.rest``: the arguments that no parser knows. Only ``run`` takes any, for pytest.
        """


COMMANDS: Mapping[str, Command] = {
    "run": run,
    "check": check,
    "explore": explore,
    "faults": faults,
    "explain": explain,
    "sandbox": sandbox,
    "doctor": doctor,
}
"""In the order in which --help lists them."""
