"""Notices each import of a module of the user, and calls a function after the outermost one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.importable import belongs_to_user, is_in_installation_folder, spec_of


def spec_of_finders_after(
    finder: object, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """What the finders that stand behind this one in ``sys.meta_path`` find. Those before it may be
    asking it, so to ask them would never end.
    """
    place = next((at for at, one in enumerate(sys.meta_path) if one is finder), -1)
    return spec_of(sys.meta_path[place + 1 :], name, path, target)


class ImportWatch:
    """A finder for ``sys.meta_path`` that finds nothing itself.

    ``imported``: the names of the user's modules, those first whose import was complete first, so
    that a module stands behind those that it imports. ``after_each`` is called with each module as
    soon as its import is complete, ``after_import`` after each import that no other one contains.
    """

    def __init__(self) -> None:
        self.imported: list[str] = []
        self.after_each: Callable[[ModuleType], object] = lambda module: None
        self.after_import: Callable[[], object] | None = None
        self._depth = 0
        self._in_library = False

    def start(self) -> None:
        """Watch all imports from now on."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the other finders find the module, and watch its import if it is the user's."""
        spec = spec_of_finders_after(self, name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            if belongs_to_user(spec.origin or ""):
                self._watch(spec.loader)
            elif is_in_installation_folder(spec.origin or ""):
                self._watch_library(spec.loader)
        return spec

    def _watch_library(self, loader: Any) -> None:
        """What an import of an installed package changes in the process is no step's change."""
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            if self._in_library:
                load(module)
                return
            self._in_library = True
            try:
                with process_state.changed_by_import():
                    load(module)
            finally:
                self._in_library = False

        loader.exec_module = exec_module

    def _watch(self, loader: Any) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the module keeps its loader
            self._depth += 1
            try:
                load(module)
                if module.__name__ in self.imported:
                    self.imported.remove(module.__name__)
                self.imported.append(module.__name__)
                self.after_each(module)
            finally:
                self._depth -= 1
            if self._depth == 0 and self.after_import is not None:
                self.after_import()

        loader.exec_module = exec_module
