"""What the parts of the slicer ask of it."""

from __future__ import annotations

from typing import Any, Protocol

from ddp_equivalence.report.script.slicing.local_definitions import LocalDefinition
from ddp_equivalence.report.script.slicing.source_module import SourceModule


class Definitions(Protocol):
    """Brings definitions and values into the script and answers with their names there."""

    def definition(self, module: SourceModule, name: str, preferred: str = "") -> str | None:
        """The name in the script of a module's name; None for a builtin.

        ``preferred``: the name that it gets if it is free. Raises NoSource.
        """

    def local_definition(
        self, module: SourceModule, local: LocalDefinition, value: object, preferred: str
    ) -> str:
        """The name in the script of ``value``, which a function or lambda expression made."""

    def expression(self, value: Any, preferred: str = "") -> str:
        """Source whose value in the script is this one. Raises NoSource if there is none."""

    def named(self, value: Any, preferred: str) -> str:
        """A name, or a dotted name, whose value in the script is this one. Raises NoSource."""

    def is_replaced(self, module: str, name: str) -> bool:
        """True if the script contains something else instead of this name."""
