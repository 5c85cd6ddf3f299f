"""What modules hold, as a table that can be compared with that of another process, and put back.

The table has a row for each object that a module holds, under the path that leads to it. Functions
and classes of installed packages are described by their names, those of the user's modules by their
code and everything that they hold, and objects by their attributes. What cannot be pickled, such as
a lock, is described by its type.
"""

from __future__ import annotations

import copyreg
import ctypes
import hashlib
import io
import marshal
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from importlib import import_module
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.ranks.importable import is_pickled_by_value

# What an object holds, how to read it and how to set it.

ATTRIBUTE, ITEM, CELL, PART = "attribute", "item", "cell", "part"
"""The kinds of steps from an object to one that it holds.

``ATTRIBUTE``: also a global of a module. ``ITEM``: of a dict by its key, of a list or tuple by its
number. ``CELL``: a variable of a closure, by its number. ``PART``: a key or a value of a dict whose
keys are no constants, by its number.
"""

Step = tuple[str, Any]
Path = tuple[Any, ...]
"""The name of a module, then steps."""

CONSTANTS: frozenset[type] = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype)
)

DESCRIPTORS = (staticmethod, classmethod, property)

DEFAULTS = ("__defaults__", "__kwdefaults__")

SET_BY_TORCH = frozenset({"_autograd_function_id"})
"""A number that torch gives to every subclass of ``torch.autograd.Function``, in turn."""


def held(owner: Any) -> dict[Step, Any]:
    """All objects that this one holds."""
    if isinstance(owner, FunctionType):
        defaults = {(ATTRIBUTE, name): getattr(owner, name) for name in DEFAULTS}
        return defaults | _attributes(vars(owner)) | _cells(owner)
    if isinstance(owner, ModuleType):  # a submodule is there as soon as anybody has imported it
        return {
            (ATTRIBUTE, name): value
            for name, value in list(vars(owner).items())
            if _counts(name, value)
            and name.isidentifier()
            and not (isinstance(value, ModuleType) and value.__name__ == f"{owner.__name__}.{name}")
        }
    if isinstance(owner, type):
        return _attributes(vars(owner))
    if isinstance(owner, ContextVar):
        return {(ATTRIBUTE, "value"): owner.get()} if owner in copy_context() else {}
    if isinstance(owner, DESCRIPTORS):
        parts = ("fget", "fset", "fdel") if isinstance(owner, property) else ("__func__",)
        return {(ATTRIBUTE, name): getattr(owner, name) for name in parts}
    if isinstance(owner, dict | MappingProxyType):
        pairs = contents(owner)
        if all(_is_plain_key(key) for key, _ in pairs):
            return {(ITEM, key): value for key, value in pairs} | _fields(owner)
        flat = [one for pair in pairs for one in pair]
        return {(PART, number): one for number, one in enumerate(flat)} | _fields(owner)
    if isinstance(owner, list | tuple):
        items = {(ITEM, number): one for number, one in enumerate(contents(owner))}
        return items | (_fields(owner) if isinstance(owner, list) else {})
    return _fields(owner)


def hold(owner: Any, wanted: Mapping[Step, Any]) -> None:
    """Let the object hold exactly this, in this order."""
    now = held(owner)
    if [*now] == [*wanted] and all(now[step] is value for step, value in wanted.items()):
        return
    items = [(key, value) for (kind, key), value in wanted.items() if kind == ITEM]
    if isinstance(owner, list):
        list.__setitem__(owner, slice(None), [value for _, value in items])
    elif isinstance(owner, dict):
        base = _base(owner)
        base.clear(owner)
        for key, value in items:
            base.__setitem__(owner, key, value)
    for kind, key in now.keys() | wanted.keys():
        value = wanted.get((kind, key), MISSING)
        if value is now.get((kind, key), MISSING):
            continue
        if kind == ATTRIBUTE:
            _set(owner, key, value)
        elif kind == CELL:
            _set(owner.__closure__[key], "cell_contents", value)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, or delete it if the value is ``MISSING``, whatever its class does then."""
    if isinstance(owner, ContextVar):
        if value is not MISSING:  # nothing can take its value away
            owner.set(value)
    elif isinstance(owner, type | FunctionType | CellType) or name in _slots(owner):
        base: Any = type if isinstance(owner, type) else object
        if value is MISSING:
            base.__delattr__(owner, name)
        else:
            base.__setattr__(owner, name, value)
    elif value is MISSING:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = value


MISSING: Any = object()
"""Stands for a value that does not exist."""


def read(owner: Any, steps: Path) -> Any:
    """The value at the end of these steps. Raises an error of any type if there is none."""
    for step in steps:
        owner = held(owner)[step]
    return owner


def resolve(path: Path) -> Any:
    """The value at this path on a rank. Raises LookupError if the rank's import has none there."""
    try:
        return read(import_module(path[0]), path[1:])
    except Exception as error:
        raise LookupError(
            f"this rank has no {text(path)}, which the step uses: the import of {path[0]} and of "
            f"what fills it gives something else here than in your process ({error!r}); what an "
            "import puts there must not depend on the rank or on its environment"
        ) from error


def text(path: Path) -> str:
    """The path as a user writes it, such as ``train.SETTINGS['average']``."""
    words = [path[0]]
    for kind, key in path[1:]:
        if kind == PART:
            words.append(f"[{('key', 'value')[key % 2]} {key // 2}]")
        elif kind == CELL:
            words.append(f".__closure__[{key}]")
        else:
            words.append(f".{key}" if kind == ATTRIBUTE else f"[{key!r}]")
    return "".join(words)


BASES = (OrderedDict, dict, list, tuple, set, frozenset, MappingProxyType)
"""The builtin types of containers; a subclass stands before its base."""


def contents(container: Any) -> list[Any]:
    """All that a list or a dict holds; of a dict the pairs of key and value."""
    base = _base(container)
    return list((base.items if hasattr(base, "items") else base.__iter__)(container))


def _base(container: Any) -> Any:
    """The builtin type of a container, whose methods do what a subclass may have changed."""
    kind = type(container)
    return kind if kind in BASES else next(base for base in BASES if isinstance(container, base))


def _attributes(names: Mapping[str, Any]) -> dict[Step, Any]:
    """Without those that Python, decorators and torch set for themselves."""
    return {(ATTRIBUTE, name): value for name, value in names.items() if _counts(name, value)}


def _counts(name: str, value: object) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return isinstance(value, (FunctionType, *DESCRIPTORS))
    return name not in SET_BY_TORCH


def _cells(function: FunctionType) -> dict[Step, Any]:
    found: dict[Step, Any] = {}
    for number, cell in enumerate(function.__closure__ or ()):
        try:
            found[CELL, number] = cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    return found


def _fields(value: Any) -> dict[Step, Any]:
    """Everything in the object's ``__dict__`` and slots."""
    if type(value) in (dict, list):
        return {}
    found = {(ATTRIBUTE, name): one for name, one in getattr(value, "__dict__", {}).items()}
    for name in _slots(value):
        try:
            found[ATTRIBUTE, name] = object.__getattribute__(value, name)
        except AttributeError:  # the slot has no value
            continue
    return found


def _slots(value: Any) -> list[str]:
    names: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # as pickle
    return names


def _is_plain_key(key: Any) -> bool:
    return type(key) in CONSTANTS or (type(key) is tuple and all(map(_is_plain_key, key)))


# The table of what modules hold.

Leaf = tuple[Any, ...]
"""An object as the one that holds it is compared: a kind of those below, and what is compared."""

CONSTANT, NAMED, GROUP, HELD = "constant", "named", "group", "held"
"""The kinds of leaves. ``GROUP``: a tuple or a property, which can only be replaced as a whole.
``HELD``: an object with a row of its own; the path of the row and its ``about`` follow."""

FUNCTION, CLASS, KEPT = "function", "class", "kept"
"""What ``about`` begins with for some objects. ``KEPT``: one that cannot be pickled."""

LONG_CONTAINER, LONG_TEXT = 64, 1024
"""Containers of more constants than this, and longer texts, are described by a digest."""

OF_THIS_PROCESS = (
    *(ctypes.CDLL, ctypes._SimpleCData, ctypes._Pointer, ctypes.Structure, io.IOBase),
    *(weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
"""Types of objects that mean nothing in another process, even if they can be pickled."""


class Row(NamedTuple):
    """An object that a module holds.

    ``about``: what makes it this object; where it differs, the object is replaced by another one.
    ``items``: what else it holds, by step; where they differ, they are set in the same object.
    """

    about: Any
    items: dict[Step, Leaf]


Rows = dict[str, dict[Path, Row]]
"""Module -> path -> row. Another process can receive and compare it."""


def _name_in_python(value: Any) -> str | None:
    """The name of an object in the module of the standard library that has its class and holds it,
    such as ``annotations`` of ``__future__``. Whoever else holds it, it is the same everywhere.
    """
    module = type(value).__module__
    if module == "builtins" or module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    held_there = vars(sys.modules[module]).items() if module in sys.modules else ()
    return next((name for name, one in held_there if one is value), None)


class Contents:
    """``rows``: the table. ``places``: the id of an object -> its path. ``codes``: those of the
    functions of the user. ``apart``: of objects to which no path leads, functions by their code.
    """

    def __init__(self, modules: Iterable[ModuleType] = (), *, apart: bool = False) -> None:
        self.rows: Rows = {}
        self.places: dict[int, Path] = {}
        self.codes: set[CodeType] = set()
        self._module = ""
        self._abouts: dict[Path, Any] = {}
        self._objects: dict[Path, tuple[Any, dict[Step, Any] | None]] = {}
        self._apart = apart
        for module in modules:
            self.add(module)

    def add(self, module: ModuleType) -> None:
        """Describe one more module. Those that others import come first."""
        self._module = module.__name__
        path = (self._module,)
        items = held(module)
        for step, value in items.items():  # so that an object has its shortest path
            if not isinstance(value, FunctionType | type) or self._in_full(value):
                self.places.setdefault(id(value), (*path, step))
        self._add_row(module, path, "module", items)

    def put_back(self) -> None:
        """Let each of these objects hold again what it held when it was described."""
        for owner, items in self._objects.values():
            if items is not None:
                hold(owner, items)

    def _add_row(self, value: Any, path: Path, about: Any, items: dict[Step, Any] | None) -> None:
        self._abouts[path] = about
        self._objects[path] = value, items
        leaves = {step: self._leaf(one, (*path, step)) for step, one in (items or {}).items()}
        self.rows.setdefault(path[0], {})[path] = Row(about, leaves)

    def _leaf(self, value: Any, path: Path) -> Leaf:
        kind = type(value)
        if kind in CONSTANTS:
            return _constant(value)
        if isinstance(value, ModuleType):
            return NAMED, "module", value.__name__
        if isinstance(value, BuiltinFunctionType) and isinstance(
            getattr(value, "__self__", None), ModuleType | type(None)
        ):
            return NAMED, value.__module__, value.__qualname__
        if self._apart and kind in BASES and not value:
            return CONSTANT, kind.__name__
        if isinstance(value, FunctionType) and self._apart:
            return NAMED, value.__module__, value.__qualname__, of_code(value.__code__)
        if isinstance(value, FunctionType | type) and (self._apart or not self._in_full(value)):
            return NAMED, value.__module__, value.__qualname__
        if (name := _name_in_python(value)) is not None:
            return NAMED, kind.__module__, name
        if isinstance(value, (tuple, *DESCRIPTORS)):
            long = _digest_if_long(contents(value)) if isinstance(value, tuple) else ()
            return GROUP, *_type(value), *(long or self._leaves(held(value), path))
        path = self.places.setdefault(id(value), path)
        if path not in self._objects:
            self._objects[path] = value, None
            try:
                about, items = self._object(value, path)
            except Exception:  # its class may raise anything when it is pickled
                about, items = (KEPT, *_type(value)), None
            self._add_row(value, path, about, items)
        return HELD, path, self._abouts.get(path)  # None: it holds itself

    def _leaves(self, items: Mapping[Step, Any], path: Path) -> Iterator[Leaf]:
        for step, one in items.items():
            yield self._leaf(one, (*path, step))

    def _in_full(self, value: Any) -> bool:
        """True for what belongs to the module at hand, and for what has no name elsewhere."""
        return value.__module__ == self._module or is_pickled_by_value(value)

    def _object(self, value: Any, path: Path) -> tuple[Any, dict[Step, Any] | None]:
        """Its ``about``, and what can be set in it, if anything can."""
        name = _type(value)
        if isinstance(value, FunctionType):
            self.codes.add(value.__code__)
            code = of_code(value.__code__)
            return (FUNCTION, value.__module__, value.__qualname__, code), held(value)
        if isinstance(value, type):
            bases = tuple((base.__module__, base.__qualname__) for base in value.__bases__)
            return (CLASS, value.__module__, value.__qualname__, bases), held(value)
        if isinstance(value, Tensor):
            shape = tuple(value.shape), value.dtype, str(value.device), value.requires_grad
            return (*name, *shape, _of_tensor(value)), None
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            array = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return (*name, str(value.dtype), value.shape, _digest(array.data)), None
        if isinstance(value, OF_THIS_PROCESS):  # pytest exchanges the standard streams for others
            return (KEPT, *(("file",) if isinstance(value, io.IOBase) else name)), None
        if isinstance(value, set | frozenset):
            return (*name, *sorted(map(self._element, contents(value)))), None
        if isinstance(value, dict | list | MappingProxyType):
            if not _fields(value) and (long := _digest_if_long(contents(value))):
                return (*name, *long), None
            items = held(value)
            if isinstance(value, MappingProxyType) or any(kind == PART for kind, _ in items):
                return (*name, *self._leaves(items, path)), None
            return name, items
        if not has_plain_state(value) and not isinstance(value, ContextVar):
            try:
                parts = _reduction(value)
                return (name, parts) if self._apart else ((*name, _of_object(parts)), None)
            except Exception:
                if not hasattr(value, "__dict__"):
                    raise
        elif not (hasattr(value, "__dict__") or isinstance(value, ContextVar)):
            value.__reduce_ex__(5)  # raises an error for a lock
        return name, held(value)

    def _element(self, value: Any) -> str:
        """An element of a set, to which no path leads."""
        if type(value) in CONSTANTS:
            return repr(_constant(value))
        return repr(_type(value) if self._apart else _of_object(value))


def _of_object(value: Any) -> bytes:
    """The digest of everything that an object holds."""
    table = Contents(apart=True)
    leaf = table._leaf(value, ("",))
    rows = [(path, *row) for path, row in table.rows.get("", {}).items()]
    return _digest(repr((leaf, rows)).encode(errors="backslashreplace"))


def _constant(value: Any) -> Leaf:
    name = type(value).__name__
    if isinstance(value, str | bytes) and len(value) > LONG_TEXT:
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return CONSTANT, name, len(value), _digest(data)
    return CONSTANT, name, repr(value) if isinstance(value, float | complex) else value


def _type(value: object) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def has_plain_state(value: Any) -> bool:
    """True if the object is pickled as its ``__dict__`` and slots."""
    cls: Any = type(value)
    plain: Any = object
    return (
        cls.__reduce_ex__ is plain.__reduce_ex__
        and cls.__reduce__ is plain.__reduce__
        and cls.__getstate__ is plain.__getstate__
        and cls not in copyreg.dispatch_table
        and not any(hasattr(cls, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
    )


def _reduction(value: Any) -> dict[Step, Any]:
    """What the object is made of again when it is unpickled. Raises what its class raises."""
    reduce = copyreg.dispatch_table.get(type(value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts: Any = reduce(value) if reduce else value.__reduce_ex__(5)
    if isinstance(parts, str):
        return {(PART, 0): parts}
    parts = [list(one) if isinstance(one, Iterator) else one for one in parts]
    return {(PART, number): one for number, one in enumerate(parts)}


# Where two tables differ, and the edits that make one process like the other.


class Difference(NamedTuple):
    """An object that holds other things: ``steps`` lead to those that differ, or are missing."""

    path: Path
    steps: list[Step]
    wanted: Row
    present: Row


class Edit(NamedTuple):
    """Let the object at ``path`` hold these steps, in this order: ``values``, and what it has."""

    path: Path
    steps: Sequence[Step]
    values: dict[Step, Any]


def differences(wanted: Rows, present: Rows) -> Iterator[Difference]:
    """All that is to be edited in a process that is as ``present``, to make it as ``wanted`` says.

    Only modules that both describe are compared. An object that is replaced is replaced wherever it
    is held, since each leaf says which object it is.
    """
    for module, rows in wanted.items():
        for path, row in rows.items():
            there = present.get(module, {}).get(path)
            if there is None or there.about != row.about:
                continue
            if there.items == row.items and [*there.items] == [*row.items]:
                continue
            steps = [
                s for s in {**row.items, **there.items} if row.items.get(s) != there.items.get(s)
            ]
            if steps or _order(row) != _order(there):
                yield Difference(path, steps, row, there)


def _order(row: Row) -> list[Step]:
    return [step for step in row.items if step[0] == ITEM]


def apply(edits: Iterable[Edit]) -> None:
    """Make these edits in the modules of this process."""
    for owner, edit in [(resolve(edit.path), edit) for edit in edits]:
        known = held(owner) | edit.values
        hold(owner, {step: known[step] for step in edit.steps if step in known})


# Digests of code and of objects, equal in two processes if what they hold is equal.

MAX_KNOWN_CODES = 20_000


def of_code(code: CodeType) -> bytes:
    """The digest of what the code does, wherever in its file it stands."""
    known = _known_codes.get(id(code))
    if known is None:
        if len(_known_codes) > MAX_KNOWN_CODES:
            _known_codes.clear()
        parts = [
            code.co_code,
            *(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags),
            *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
            *map(_of_constant, code.co_consts),
        ]
        known = _known_codes[id(code)] = code, _digest(repr(parts).encode())
    return known[1]


_known_codes: dict[int, tuple[CodeType, bytes]] = {}
"""Id -> the code, which keeps its id, and its digest."""


def _of_constant(value: Any) -> object:
    if isinstance(value, CodeType):
        return of_code(value)
    if isinstance(value, frozenset):
        return sorted(repr(_of_constant(one)) for one in value)
    if isinstance(value, tuple):
        return tuple(map(_of_constant, value))
    return value


def _of_tensor(tensor: Tensor) -> bytes:
    dense = tensor.detach().cpu() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _digest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def _digest_if_long(items: list[Any]) -> tuple[Any, ...]:
    """Number and digest of many items that are all constants or containers of them; else ()."""
    if len(items) <= LONG_CONTAINER:
        return ()
    try:
        # This version of the format does not depend on which equal strings are identical.
        return len(items), _digest(marshal.dumps(items, 2))
    except ValueError:  # it holds something else, or itself
        return ()


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
