"""Which libraries for training a rank has imported: they may keep state from check to check.

Accelerate, for example, keeps the precision of its first accelerator for all later ones of the same
process. The suite cannot take back what a library keeps in its own objects; new processes can.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ddp_equivalence.ranks.importable import is_in_installation_folder

NO_LIBRARIES = frozenset({"torch", "functorch", "torchgen", "triton", "ddp_equivalence"})
"""Torch itself, whose state between checks is restored, its parts, and this package."""


class Libraries:
    """``of_earlier_work``: the libraries that were imported before the present work began."""

    def __init__(self) -> None:
        self.of_earlier_work: tuple[str, ...] = ()
        self._at_start: frozenset[str] = frozenset(NO_LIBRARIES)
        self._counted = 0
        self._imported: tuple[str, ...] = ()

    def start(self) -> None:
        """What is imported now was imported for the rank itself."""
        self._at_start = NO_LIBRARIES | {name.partition(".")[0] for name in list(sys.modules)}
        self._counted = len(sys.modules)

    def begin_work(self) -> None:
        """Another piece of work begins."""
        self.of_earlier_work = self.imported()

    def imported(self) -> tuple[str, ...]:
        """The libraries that any work has imported so far: installed packages that use torch."""
        if self._counted != len(sys.modules):
            self._counted = len(sys.modules)
            users = {
                name.partition(".")[0]
                for name, module in list(sys.modules.items())
                if name.partition(".")[0] not in self._at_start and _uses_torch(module)
            }
            self._imported = tuple(sorted(filter(_is_installed, users)))
        return self._imported


def _uses_torch(module: Any) -> bool:
    torch = sys.modules["torch"]
    # Compared by identity: some values raise if they are compared, such as one of zoneinfo's.
    return isinstance(module, ModuleType) and any(
        value is torch for value in list(vars(module).values())
    )


def _is_installed(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and is_in_installation_folder(file)


libraries = Libraries()
"""Those of this process, if it is a rank."""
