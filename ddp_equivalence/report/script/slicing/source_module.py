"""A module that definitions are taken from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_equivalence.report.script.slicing.sliceable import is_own_module
from ddp_equivalence.report.script.slicing.source import Source, source_of


@dataclass(frozen=True)
class SourceModule:
    """The source of a module, and the values of the module's names now."""

    name: str
    source: Source
    namespace: dict[str, Any]

    @property
    def is_own(self) -> bool:
        """True for a module of this package."""
        return is_own_module(self.name)

    @property
    def stem(self) -> str:
        """A short name for the module that can be part of an identifier."""
        path = Path(self.source.file)
        stem = path.parent.name if path.stem == "__init__" else path.stem
        return stem if stem.isidentifier() else "cell"


def source_module(imported: ModuleType) -> SourceModule | None:
    """The source and names of an imported module; None if it has no Python source."""
    file = getattr(imported, "__file__", None)
    source = source_of(file, vars(imported)) if isinstance(file, str) else None
    return SourceModule(imported.__name__, source, vars(imported)) if source else None
