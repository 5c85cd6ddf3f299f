"""Lets torch.compile import the modules whose functions a rank was sent by value."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

# A file that ``check`` runs has a name that no rank can import, so its functions are sent by value.
# torch.compile reads what such a function finds in its module from the module of that name, which
# it imports. Source: torch 2.13, torch/_dynamo/symbolic_convert.py, ``import_source``.


class SentModule(ModuleType):
    """Has what the functions of this module that were sent last find in their globals."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # multiprocessing would run the file of __main__
        try:
            return _globals_of(self.__name__)[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


_modules: dict[str, SentModule] = {}
"""Those that were asked for in any work: torch.compile remembers them."""

_known: dict[str, dict[str, Any]] = {}
"""Name of a module -> the globals of its functions in the work that runs; {} if there are none."""


def _globals_of(module: str) -> dict[str, Any]:
    if module not in _known:
        functions = (one for one in gc.get_objects() if type(one) is FunctionType)
        sent = (one.__globals__ for one in functions if one.__globals__.get("__name__") == module)
        _known[module] = next(sent, {})
    return _known[module]


class _Finder(Loader, MetaPathFinder):
    """A finder for ``sys.meta_path``, and the loader of what it finds."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if path is None and _globals_of(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _modules.setdefault(spec.name, SentModule(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


@contextmanager
def importable() -> Iterator[None]:
    """Inside the block, modules that no finder finds are looked for among what was sent, and the
    main module is that of the functions that were sent from one.
    """
    finder = _Finder()
    sys.meta_path.append(finder)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = _modules.setdefault("__main__", SentModule("__main__"))
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for name, module in _modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            for left in [one for one in vars(module) if not one.startswith("__")]:
                delattr(module, left)
        _known.clear()
