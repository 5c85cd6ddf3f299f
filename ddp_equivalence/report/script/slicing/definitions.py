"""The methods of the slicer that its own parts call."""

from __future__ import annotations

from typing import Any, Protocol

from ddp_equivalence.report.script.slicing.local_definitions import LocalDefinition
from ddp_equivalence.report.script.slicing.source_module import SourceModule


class Definitions(Protocol):
    """Brings definitions and values into the script, and returns their names there."""

    def definition(self, module: SourceModule, name: str, preferred: str = "") -> str | None:
        """Bring in the definition of a module's name; return its name in the script.

        None for a builtin. ``preferred``: the name that it gets if that is free. Raises NoSource.
        """

    def local_definition(
        self, module: SourceModule, local: LocalDefinition, value: object, preferred: str
    ) -> str:
        """Bring in a lambda, or what a function defined; return its name in the script."""

    def expression(self, value: Any, preferred: str = "") -> str:
        """An expression that has this value in the script. Raises NoSource if there is none."""

    def named(self, value: Any, preferred: str) -> str:
        """A name, or a dotted name, that has this value in the script. Raises NoSource."""

    def is_replaced(self, module: str, name: str) -> bool:
        """True if the script contains something else instead of this name."""
