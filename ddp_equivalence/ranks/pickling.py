"""Pickles functions for the ranks, lambdas and closures too, whatever pytest's import mode is.

A function of an importable module is pickled as its name. A function that the ranks cannot import
under its name is pickled by value, with cloudpickle. Examples are a function of a test module under
``--import-mode=importlib``, and one of a file given on the command line.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from ddp_equivalence.ranks.fingerprint import Fingerprint, NoFingerprint, fingerprint
from ddp_equivalence.ranks.importable import is_pickled_by_value, modules_pickled_by_value
from ddp_equivalence.ranks.process_settings import read_training_settings
from ddp_equivalence.ranks.process_state import environment_variables

MAX_CACHED = 64
"""The number of pickles that are kept. The most recently used ones stay."""

_cache: OrderedDict[Fingerprint, tuple[bytes, tuple[object, ...]]] = OrderedDict()
"""Fingerprint -> the pickle, and the objects to keep alive as long as the fingerprint is used."""


@dataclass(frozen=True)
class CallerState:
    """The state of the judging process that a pickled function may depend on."""

    import_path: list[str]
    working_folder: str
    environment: dict[bytes, bytes]
    settings: dict[str, Any]


def dumps(function: Callable[..., Any], argument: object) -> bytes:
    """Pickle a function and its argument, together with the state of this process.

    Functions and classes that the ranks cannot import are pickled separately, by value. That pickle
    is used again unless something in them may have changed since.
    """
    caller = CallerState(
        list(sys.path), os.getcwd(), environment_variables(), read_training_settings()
    )
    body = BytesIO()
    pickler = _Pickler(body, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump((function, argument))
    return pickle.dumps((caller, _dumps_by_value(tuple(pickler.by_value)), body.getvalue()))


def split(message: bytes) -> tuple[CallerState, bytes, bytes]:
    """Split the result of ``dumps`` into the caller's state and the two arguments of ``loads``.

    The rank adopts the state first, because ``loads`` imports modules.
    """
    parts: tuple[CallerState, bytes, bytes] = pickle.loads(message)
    return parts


def loads(by_value: bytes, body: bytes) -> tuple[Callable[..., Any], Any]:
    """The function and its argument."""
    unpickler = _Unpickler(BytesIO(body), pickle.loads(by_value))
    work: tuple[Callable[..., Any], Any] = unpickler.load()
    return work


class _Pickler(pickle.Pickler):
    """Collects in ``by_value`` what must be pickled by value, and pickles its index instead."""

    def __init__(self, file: BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.by_value: list[object] = []

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, FunctionType | type | ModuleType):
            return None
        if not is_pickled_by_value(value):
            return None
        for index, collected in enumerate(self.by_value):
            if collected is value:
                return index
        self.by_value.append(value)
        return len(self.by_value) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, by_value: tuple[object, ...]) -> None:
        super().__init__(file)
        self._by_value = by_value

    def persistent_load(self, index: int) -> object:
        return self._by_value[index]


def _dumps_by_value(values: tuple[object, ...]) -> bytes:
    """Pickle these objects by value, or return the last pickle if they have not changed."""
    if not values:
        return _NO_VALUES
    try:
        key, identified = fingerprint(values, is_pickled_by_value)
    except NoFingerprint:
        return _cloudpickle(values)
    if key not in _cache:
        _cache[key] = _cloudpickle(values), identified
        while len(_cache) > MAX_CACHED:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return _cache[key][0]


_NO_VALUES = pickle.dumps(())


def _cloudpickle(values: tuple[object, ...]) -> bytes:
    modules = modules_pickled_by_value()
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = BytesIO()
        _CloudPickler(file).dump(values)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


class _CloudPickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # it is not typed
    """Pickles even a module of a special class, such as ``torch.backends.cudnn``, as its name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            names = [name for name, module in list(sys.modules.items()) if module is value]
            if names:
                return import_module, (names[0],)
        return super().reducer_override(value)
