"""Gives a rank the user's modules as the caller has them, for the time of one piece of work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType

from ddp_equivalence.ranks.user_modules import differences
from ddp_equivalence.ranks.user_modules.description import Description, describe
from ddp_equivalence.ranks.user_modules.differences import Edit
from ddp_equivalence.ranks.user_modules.import_watch import ImportWatch

watch = ImportWatch()
"""It watches the imports of this process, if the process is a rank."""


class ModulesOfWork:
    """The state of the user's modules on this rank during one piece of work.

    ``compared``: the modules that the caller has compared with a fresh import. ``failed``: module
    -> why it could not be compared. ``not_compared``: others that the work has imported. ``known``:
    what the modules held after the last work, so that they need not be described again.
    """

    known = Description()

    def __init__(self, compared: frozenset[str], failed: Mapping[str, str]) -> None:
        self.not_compared: tuple[str, ...] = ()
        self._compared = compared
        self._failed = failed
        self._working = self._imports_while_working = False
        self._edits: Mapping[str, list[Edit]] = {}
        self._undo: dict[str, Callable[[], None]] = {}
        self._before = Description()

    def begin(self, edits: Mapping[str, list[Edit]]) -> None:
        """Edit the modules that are imported now, and each other one as soon as it is imported."""
        self._edits = edits
        if not edits and ModulesOfWork.known.nodes.keys() >= set(self._imported()):
            self._before = ModulesOfWork.known  # else an import may have changed earlier ones
        ModulesOfWork.known = Description()
        self._after_import()
        self._working = True
        watch.after_import = self._after_import

    def end(self) -> bool:
        """Take back all edits, and all that the work has changed in the modules.

        Returns False if that cannot be done.
        """
        watch.after_import = None
        restored = self._restore()
        for undo in reversed(self._undo.values()):
            try:
                undo()
            except Exception:  # the work may have left anything in place of what was edited
                restored = False
        if not self._undo:
            ModulesOfWork.known = self._before
        return restored

    def _after_import(self) -> None:
        new = [name for name in self._imported() if name not in self._before.nodes]
        for name in self._failed.keys() & set(new):
            raise RuntimeError(
                f"{name} can be imported on a rank, but not in a process that is no rank "
                f"({self._failed[name]}), so it is not known what your process has changed in it"
            )
        if self._working:
            self._imports_while_working |= bool(new)
            self.not_compared += tuple(name for name in new if name not in self._compared)
        for name in new:
            if name in self._edits:
                module = sys.modules[name]
                self._undo[name] = differences.apply(module, self._edits[name])
        for name in new:
            self._before.add(sys.modules[name])

    def _imported(self) -> list[str]:
        names = watch.imported  # a module may have put another object in its own place
        return [name for name in names if isinstance(sys.modules.get(name), ModuleType)]

    def _restore(self) -> bool:
        if not self._before.nodes:
            return True
        modules = [sys.modules.get(name) for name in self._before.nodes]
        after = describe([module for module in modules if module is not None])
        if after.nodes == self._before.nodes:
            return True
        if self._imports_while_working:
            return False  # perhaps an import has filled a registry, which must stay as it is
        try:
            changed = differences.differences(wanted=self._before, present=after)
            by_module: dict[str, list[Edit]] = {}
            for one in changed:
                edit = differences.from_description(one)
                by_module.setdefault(one.path[0], []).append(edit)
            for name, edits in by_module.items():
                differences.apply(sys.modules[name], edits)
        except Exception:
            return False
        again = describe([sys.modules[name] for name in self._before.nodes])
        return again.nodes == self._before.nodes
