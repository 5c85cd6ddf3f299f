"""Carry functions to the ranks, whatever pytest's import mode: lambdas and closures too.

cloudpickle sends a function of an importable module by name. A module that the ranks cannot import
under that name (a test module under ``--import-mode=importlib``, a file given on the command line)
is sent by value instead.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch

TEST_FILES = ("test_*.py", "*_test.py", "conftest.py")
"""Sent by value even where they could be imported: importing a test module has side effects."""

_INSTALLED = tuple(
    {str(Path(path).resolve()) for path in sysconfig.get_paths().values() if path}
    - {str(Path(sys.prefix).resolve())}
)
_PACKAGE = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Around:
    """What functions may see of the process they come from."""

    path: list[str]
    folder: str
    environment: dict[str, str]
    default_dtype: torch.dtype


_travels: dict[tuple[str, str], bool] = {}


def dumps(function: Callable[..., Any], payload: object, foreign: bool = True) -> bytes:
    """Pickle work for a rank, with the import path and working folder to open it in.

    ``foreign``: there may be functions of the user's in it; looking for their modules costs 6 ms.
    """
    modules = list(sys.modules.values()) if foreign else []
    carried = [module for module in modules if _by_value(module)]
    for module in carried:
        cloudpickle.register_pickle_by_value(module)
    try:
        work: bytes = cloudpickle.dumps((function, payload))
    finally:
        for module in carried:
            cloudpickle.unregister_pickle_by_value(module)
    around = Around(list(sys.path), os.getcwd(), dict(os.environ), torch.get_default_dtype())
    opened: bytes = cloudpickle.dumps((around, work))
    return opened


def _by_value(module: object) -> bool:
    if not isinstance(module, ModuleType) or module.__name__ == "__main__":
        return False  # cloudpickle already sends __main__ by value
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or sys.modules.get(module.__name__) is not module:
        return False
    key = module.__name__, file
    if key not in _travels:
        _travels[key] = _is_own(file) and (
            any(fnmatch(Path(file).name, pattern) for pattern in TEST_FILES)
            or not _importable(module.__name__, file)
        )
    return _travels[key]


def _is_own(file: str) -> bool:
    path = str(Path(file).resolve())
    return not path.startswith((*_INSTALLED, _PACKAGE))


def _importable(name: str, file: str) -> bool:
    """Would a fresh interpreter with this import path find the same file under this name?"""
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or [])
    return spec is not None and spec.origin is not None and Path(spec.origin) == Path(file)


def _find(name: str, path: list[str] | None) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path, None) if find else None
        if spec is not None:
            return spec
    return None
