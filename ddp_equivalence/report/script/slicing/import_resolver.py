"""Decide for every import of a sliced module whether the script imports it too."""

from __future__ import annotations

import ast
import sys
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType

from ddp_equivalence.report.script.slicing.contents import Contents
from ddp_equivalence.report.script.slicing.definitions import Definitions
from ddp_equivalence.report.script.slicing.no_source import NoSource
from ddp_equivalence.report.script.slicing.sliceable import is_installed, is_own_module, project_of
from ddp_equivalence.report.script.slicing.source_module import SourceModule, source_module


class ImportResolver:
    """The script imports installed modules, and contains definitions of the user's project and of
    this package.
    """

    def __init__(self, contents: Contents, definitions: Definitions) -> None:
        self._contents, self._names = contents, contents.names
        self._definitions = definitions
        self._projects: set[Path] = set()

    def add_project_of(self, file: str) -> None:
        """Definitions of all modules in the project of this file may be sliced from now on."""
        self._projects.add(project_of(file))

    def sliceable(self, module: ModuleType) -> SourceModule | None:
        """The source of a module whose definitions are sliced; None if the script imports it."""
        file = getattr(module, "__file__", None)
        if is_own_module(module.__name__):
            return source_module(module)
        if not isinstance(file, str) or is_installed(file):
            return None
        if not any(Path(file).resolve().is_relative_to(project) for project in self._projects):
            return None
        return source_module(module)

    def resolve(self, module: SourceModule, name: str, node: ast.Import | ast.ImportFrom) -> str:
        """Bring in a name that this statement imports; return its name in the script."""
        alias = next(a for a in node.names if (a.asname or a.name).split(".")[0] == name)
        if isinstance(node, ast.Import):
            return self.import_module(alias.name, name, plain=alias.asname is None)
        value = module.namespace.get(name)
        imported_from = _absolute_name(module, node)
        home = sys.modules.get(imported_from)
        target = self.sliceable(home) if home is not None else None
        if target is None:
            if isinstance(value, ModuleType):
                self._note_local_file(imported_from)
            return self.import_name(imported_from, alias.name, name)
        replaced = self._definitions.is_replaced(imported_from, alias.name)
        if alias.name in target.source.statements or replaced:
            return self._definitions.definition(target, alias.name) or name
        if isinstance(value, ModuleType) and not is_own_module(value.__name__):
            return self.import_name(imported_from, alias.name, name)
        return self._definitions.named(value, name)

    def import_module(self, module: str, name: str, plain: bool = False) -> str:
        """Import a module; ``plain``: without ``as``. Returns its name in the script.

        Raises NoSource for a module of this package.
        """
        if is_own_module(module):
            raise NoSource(f"it uses {module} as a whole")
        self._note_local_file(module)

        def choose() -> str:
            if plain:
                return self._names.reserve(module.split(".")[0])
            return self._names.free(name, module.replace(".", "_"))

        output = self._names.once((f"import {'' if plain else module}", name), choose)
        self._contents.imports.modules.add((module, output))
        return output

    def import_name(self, module: str, name: str, output: str) -> str:
        """Import a name from a module; ``output``: the name that it gets if it is free.

        Raises NoSource for a module of this package.
        """
        if is_own_module(module):
            raise NoSource(f"it uses {name} of {module}")
        self._note_local_file(module)
        last = module.rpartition(".")[2]

        def choose() -> str:
            chosen = self._names.free(output, f"{last}_{name}")
            self._contents.imports.names.setdefault(module, set()).add((name, chosen))
            return chosen

        return self._names.once((f"from {module} {name}", output), choose)

    def check_local_import(self, module: SourceModule, node: ast.Import | ast.ImportFrom) -> None:
        """Raise NoSource for an import inside a function that a script cannot have."""
        modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [_absolute_name(module, node)]
        for name in modules:
            if is_own_module(name) or (isinstance(node, ast.ImportFrom) and node.level):
                raise NoSource(f"it imports {name} inside a function")
            self._note_local_file(name)

    def _note_local_file(self, module: str) -> None:
        file = getattr(sys.modules.get(module.split(".")[0]), "__file__", None)
        if isinstance(file, str) and not is_installed(file):
            self._contents.local_files.add(file)


def _absolute_name(module: SourceModule, node: ast.ImportFrom) -> str:
    name = "." * node.level + (node.module or "")
    if not node.level:
        return name
    return resolve_name(name, module.namespace.get("__package__") or module.name)
