"""Tells within microseconds whether a function has changed since it was last pickled.

Pickling a function by value takes milliseconds, so the result is kept and used again. A fingerprint
covers everything that cloudpickle would send: code, defaults, closure, the globals that the code
names, and whatever those refer to in turn. A list, a dict or any other object that can change in
place cannot have a fingerprint. A function that refers to one is pickled anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

import torch

CONSTANT_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device),
)

PICKLED_BY_NAME = (
    FunctionType,
    type,
    ModuleType,
    BuiltinFunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
)
"""Objects of these types are pickled as a name, so two of them are equal only if identical."""

Fingerprint = tuple[Hashable, ...]


class NoFingerprint(Exception):
    """The value refers to an object that can change unnoticed; the message names its type."""


def fingerprint(
    value: object, by_value: Callable[[Any], bool]
) -> tuple[Fingerprint, tuple[object, ...]]:
    """A fingerprint, and the objects that the caller must keep alive as long as it is used.

    The objects are identified by ``id()``, which Python reuses once an object is freed.
    ``by_value`` is asked about each function, class and module, and returns True if it is pickled
    by value. Raises NoFingerprint.
    """
    identified: list[object] = []
    return tuple(_parts(value, by_value, identified, {})), tuple(identified)


def _parts(
    value: Any, by_value: Callable[[Any], bool], identified: list[object], seen: dict[int, int]
) -> Iterator[Hashable]:
    """Yield the parts of the fingerprint; ``seen`` numbers the functions and classes visited."""
    yield type(value).__name__
    if isinstance(value, CONSTANT_TYPES):
        yield repr(value) if isinstance(value, float | complex) else value
        return
    inner: Iterable[object]
    if isinstance(value, ModuleType) and by_value(value):
        raise NoFingerprint("module")  # it is pickled with everything in it
    if isinstance(value, CodeType):
        yield value
        yield value.co_filename  # code objects compare equal without it
        inner = ()
    elif isinstance(value, FunctionType | type) and by_value(value):
        if id(value) in seen:
            yield seen[id(value)]  # a recursive reference
            return
        seen[id(value)] = len(seen)
        inner = _of_function(value) if isinstance(value, FunctionType) else _of_class(value)
    elif isinstance(value, PICKLED_BY_NAME):
        identified.append(value)
        yield id(value)
        inner = ()
    elif isinstance(value, tuple):
        inner = (len(value), *value)
    elif isinstance(value, staticmethod | classmethod):
        inner = (value.__func__,)
    elif isinstance(value, property):
        inner = value.fget, value.fset, value.fdel
    elif isinstance(value, partial):
        inner = value.func, value.args, tuple(value.keywords.items())
    else:
        raise NoFingerprint(type(value).__name__)
    for part in inner:
        yield from _parts(part, by_value, identified, seen)


def _of_function(function: FunctionType) -> Iterator[object]:
    yield function.__code__
    yield function.__defaults__
    yield tuple((function.__kwdefaults__ or {}).items())
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value yet
            yield "empty"
    yield tuple(sorted(vars(function).items()))
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name
            yield function.__globals__[name]


def _of_class(cls: type) -> Iterator[object]:
    yield cls.__bases__
    for name, value in vars(cls).items():
        if name not in ("__dict__", "__weakref__", "__doc__", "__annotations__"):
            yield name
            yield value


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
