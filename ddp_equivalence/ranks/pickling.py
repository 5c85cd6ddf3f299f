"""Carry functions to the ranks, whatever pytest's import mode: lambdas and closures too.

cloudpickle sends a function of an importable module by name. A module that the ranks cannot import
under that name (a test module under ``--import-mode=importlib``, a file given on the command line)
is sent by value instead.
"""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from ddp_equivalence.ranks.fingerprint import Changeable, Stamp, stamp
from ddp_equivalence.ranks.process_state import settings, variables

TEST_FILES = ("test_*.py", "*_test.py", "conftest.py")
"""Sent by value even where they could be imported: importing a test module has side effects."""

_INSTALLED = tuple(
    os.path.join(path, "")
    for path in {os.path.realpath(path) for path in sysconfig.get_paths().values() if path}
    - {os.path.realpath(sys.prefix)}
)
_PACKAGE = os.path.join(Path(__file__).resolve().parent.parent, "")


@dataclass(frozen=True)
class Around:
    """What functions may see of the process they come from."""

    path: list[str]
    folder: str
    environment: dict[bytes, bytes]
    settings: dict[str, Any]


_travels: dict[tuple[str, str], bool] = {}
_judged: dict[str, tuple[ModuleType, bool]] = {}
_carried: OrderedDict[Stamp, tuple[bytes, tuple[object, ...]]] = OrderedDict()
MOST_CARRIED = 64


def dumps(function: Callable[..., Any], payload: object) -> bytes:
    """Pickle work for a rank, with the import path and working folder to open it in.

    Functions and classes that cannot be imported on the ranks go beside it by value; they are
    pickled again only if something in them may have changed.
    """
    around = Around(list(sys.path), os.getcwd(), variables(), settings())
    body = BytesIO()
    pickler = _Pickler(body, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump((function, payload))
    return pickle.dumps((around, _by_value(tuple(pickler.apart)), body.getvalue()))


def loads_around(message: bytes) -> tuple[Around, bytes, bytes]:
    """The surroundings, to be taken over before the rest is opened with ``loads``."""
    found: tuple[Around, bytes, bytes] = pickle.loads(message)
    return found


def loads(apart: bytes, body: bytes) -> tuple[Callable[..., Any], Any]:
    """The function and its payload."""
    found: tuple[Callable[..., Any], Any] = _Unpickler(BytesIO(body), pickle.loads(apart)).load()
    return found


class _Pickler(pickle.Pickler):
    """Keeps apart what has to travel by value."""

    def __init__(self, file: BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.apart: list[object] = []

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, FunctionType | type | ModuleType) or not _travels_by_value(value):
            return None
        for place, other in enumerate(self.apart):
            if other is value:
                return place
        self.apart.append(value)
        return len(self.apart) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, apart: tuple[object, ...]) -> None:
        super().__init__(file)
        self._apart = apart

    def persistent_load(self, place: int) -> object:
        return self._apart[place]


def _by_value(values: tuple[object, ...]) -> bytes:
    """These objects by value, from the last time if they are still the same."""
    if not values:
        return _NOTHING
    try:
        key, kept = stamp(values, _travels_by_value)
    except Changeable:
        return _pickled(values)
    if key not in _carried:
        _carried[key] = _pickled(values), kept
        while len(_carried) > MOST_CARRIED:
            _carried.popitem(last=False)
    _carried.move_to_end(key)
    return _carried[key][0]


_NOTHING = pickle.dumps(())


def _pickled(values: tuple[object, ...]) -> bytes:
    carried = [module for module in _modules() if _module_by_value(module)]
    for module in carried:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = BytesIO()
        _ByValue(file).dump(values)
    finally:
        for module in carried:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


class _ByValue(cloudpickle.CloudPickler):  # type: ignore[misc]  # it is not typed
    """Knows modules of classes of their own, too, such as ``torch.backends.cudnn``."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            names = [name for name, module in list(sys.modules.items()) if module is value]
            if names:
                return import_module, (names[0],)
        return super().reducer_override(value)


def _modules() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def _travels_by_value(value: Any) -> bool:
    """Would the ranks not find it under its name?"""
    if isinstance(value, ModuleType):
        return _module_by_value(value)
    name, where = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
    if where == "__main__" or "<" in name:
        return True
    module = sys.modules.get(where or "")
    if module is None:
        return where is not None and where not in sys.builtin_module_names
    if _module_by_value(module):
        return True
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not value  # replaced, or never put there


def _module_by_value(module: ModuleType) -> bool:
    judged = _judged.get(module.__name__)
    if judged is None or judged[0] is not module:
        judged = _judged[module.__name__] = module, _module_travels(module)
    return judged[1]


def _module_travels(module: ModuleType) -> bool:
    if module.__name__ == "__main__":
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
    others = (*_INSTALLED, _PACKAGE)
    return not file.startswith(others) and not os.path.realpath(file).startswith(others)


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
