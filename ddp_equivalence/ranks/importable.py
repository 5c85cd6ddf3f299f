"""Decides which functions, classes and modules the ranks cannot import under their name."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from importlib.machinery import ModuleSpec
from operator import is_
from pathlib import Path
from types import ModuleType
from typing import Any

TEST_FILES = ("test_*.py", "*_test.py", "conftest.py")
"""Files that are never imported on ranks, since importing a test module has side effects."""

_INSTALLED = tuple(
    os.path.join(path, "")
    for path in {os.path.realpath(path) for path in sysconfig.get_paths().values() if path}
    - {os.path.realpath(sys.prefix)}
)
_INSTALLATION_FOLDERS = {"site-packages", "dist-packages"}
"""The names of folders with installed packages, also of other interpreters and of a user's own."""

_PACKAGE = os.path.join(Path(__file__).resolve().parent.parent, "")

_by_file: dict[tuple[str, str], bool] = {}
"""(Module name, file) -> whether it is pickled by value. Finding this out takes milliseconds."""

_by_module: dict[str, tuple[ModuleType, bool]] = {}
"""Module name -> the module, and whether it is pickled by value."""


def is_pickled_by_value(value: Any) -> bool:
    """True if the ranks would not find this function, class or module under its name."""
    if isinstance(value, ModuleType):
        return _module_by_value(value)
    name, module_name = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
    if module_name == "__main__" or "<" in name:
        return True
    module = sys.modules.get(module_name or "")
    if module is None:
        return module_name is not None and module_name not in sys.builtin_module_names
    if isinstance(module, ModuleType) and _module_by_value(module):
        return True  # code may put any object into sys.modules
    attribute: Any = module
    for part in name.split("."):
        attribute = getattr(attribute, part, None)
    return attribute is not value  # it was replaced, or was never an attribute of its module


def modules_pickled_by_value() -> list[ModuleType]:
    """All imported modules that the ranks could not import."""
    return [sys.modules[name] for name in _users_modules()[1]]


def is_user_module(module: object) -> bool:
    """True for a module of the user that the ranks can import under its name."""
    if not isinstance(module, ModuleType) or module.__name__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return (
        isinstance(file, str)
        and sys.modules.get(module.__name__) is module
        and belongs_to_user(file)
        and not _module_by_value(module)
    )


def imported_user_modules() -> dict[str, ModuleType]:
    """The user's modules that this process has imported and the ranks can import, by name."""
    return {name: sys.modules[name] for name in _users_modules()[0]}


def _users_modules() -> tuple[list[str], list[str]]:
    """The names of the imported modules that the ranks can import, and of those they cannot."""
    global _scanned
    present = list(sys.modules.values())
    if len(present) != len(_scanned[0]) or not all(map(is_, present, _scanned[0])):
        modules = [one for one in present if isinstance(one, ModuleType)]
        by_value = {module.__name__ for module in modules if _module_by_value(module)}
        _scanned = present, [one.__name__ for one in modules if is_user_module(one)], list(by_value)
    return _scanned[1:]


_scanned: tuple[list[Any], list[str], list[str]] = ([], [], [])
"""All imported modules, as they were when ``_users_modules`` looked at them, and what it found."""


def _module_by_value(module: ModuleType) -> bool:
    known = _by_module.get(module.__name__)
    if known is None or known[0] is not module:
        known = _by_module[module.__name__] = module, _decide(module)
    return known[1]


def _decide(module: ModuleType) -> bool:
    if module.__name__ == "__main__":
        return False  # cloudpickle pickles __main__ by value anyway
    file = getattr(module, "__file__", None)
    if sys.modules.get(module.__name__) is not module:
        return False
    if not isinstance(file, str):
        return _is_made_by_hand(module)
    key = module.__name__, file
    if key not in _by_file:
        _by_file[key] = belongs_to_user(file) and (
            any(fnmatch(Path(file).name, pattern) for pattern in TEST_FILES)
            or not _is_importable(module.__name__, file)
        )
    return _by_file[key]


def _is_made_by_hand(module: ModuleType) -> bool:
    """True for a module that code of the user has put into ``sys.modules``: no import finds it."""
    top = sys.modules.get(module.__name__.partition(".")[0])
    file = getattr(top, "__file__", None)
    users = belongs_to_user(file) if isinstance(file, str) else getattr(top, "__spec__", 1) is None
    return type(module) is ModuleType and module.__spec__ is None and users


@lru_cache(maxsize=4096)
def belongs_to_user(file: str) -> bool:
    """True if the file is part neither of an installed package nor of ddp_equivalence."""
    others = (*_INSTALLED, _PACKAGE)
    return not any(
        path.startswith(others) or is_in_installation_folder(path)
        for path in (file, os.path.realpath(file))
    )


def is_in_installation_folder(file: str) -> bool:
    """True if the file is part of an installed package that is not Python's own."""
    return not _INSTALLATION_FOLDERS.isdisjoint(Path(file).parts)


def _is_importable(name: str, file: str) -> bool:
    """True if a new interpreter with this import path would find this file under this name."""
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = spec_of(sys.meta_path, ".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or [])
    return spec is not None and spec.origin is not None and Path(spec.origin) == Path(file)


def spec_of(
    finders: Iterable[object],
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None = None,
) -> ModuleSpec | None:
    """What the first of these finders finds that knows a module of this name."""
    for finder in finders:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find else None
        if spec is not None:
            return spec
    return None
