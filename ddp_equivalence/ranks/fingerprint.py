"""Tell in microseconds that a function is what it was: pickling one by value takes milliseconds.

A stamp covers all that cloudpickle would send: code, defaults, closure, the globals that the code
names, and what those lead to. Where anything in there could change without the stamp changing (a
list, a dict, an object), there is none, and the function is pickled anew.
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

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device)

NAMED = (
    FunctionType,
    type,
    ModuleType,
    BuiltinFunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
)
"""Travel as a name, so that being the same object is enough."""

Stamp = tuple[Hashable, ...]


class Changeable(Exception):
    """There is no stamp of something that leads to an object of this kind."""


def stamp(value: object, by_value: Callable[[Any], bool]) -> tuple[Stamp, tuple[object, ...]]:
    """A stamp, and the objects that must be kept alive for as long as it is compared.

    ``by_value``: whether a function or class travels by value; others travel as a name.
    Raises Changeable if there is none.
    """
    kept: list[object] = []
    return tuple(_parts(value, by_value, kept, {})), tuple(kept)


def _parts(
    value: Any, by_value: Callable[[Any], bool], kept: list[object], seen: dict[int, int]
) -> Iterator[Hashable]:
    yield type(value).__name__
    if isinstance(value, PLAIN):
        yield repr(value) if isinstance(value, float | complex) else value
        return
    inner: Iterable[object]
    if isinstance(value, ModuleType) and by_value(value):
        raise Changeable("module")  # travels with all that it holds
    if isinstance(value, CodeType):
        yield value
        yield value.co_filename  # not part of its equality
        inner = ()
    elif isinstance(value, FunctionType | type) and by_value(value):
        if id(value) in seen:
            yield seen[id(value)]  # the same one as before, in this order
            return
        seen[id(value)] = len(seen)
        inner = _of_function(value) if isinstance(value, FunctionType) else _of_class(value)
    elif isinstance(value, NAMED):
        kept.append(value)
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
        raise Changeable(type(value).__name__)
    for part in inner:
        yield from _parts(part, by_value, kept, seen)


def _of_function(function: FunctionType) -> Iterator[object]:
    yield function.__code__
    yield function.__defaults__
    yield tuple((function.__kwdefaults__ or {}).items())
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            yield "empty"
    yield tuple(sorted(vars(function).items()))
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name
            yield function.__globals__[name]


def _of_class(cls: type) -> Iterator[object]:
    yield cls.__bases__
    for name, value in vars(cls).items():
        if name not in ("__dict__", "__weakref__", "__doc__", "__annotations__"):
            yield name
            yield value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
