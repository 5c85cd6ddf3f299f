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
import pickle
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextvars import ContextVar, copy_context
from importlib import import_module
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.ranks.importable import is_pickled_by_value


class Kind:
    """The kinds of steps from an object to one that it holds.

    ``NAME``: a global of a module or an attribute of a class. ``FIELD``: an entry of ``__dict__``
    of any other object. ``ORDER``: the keys of a dict, in their order. ``NTH``: a key or a value of
    a dict whose keys are no constants. ``CELL``: a variable of a closure, by number. ``PART``: any
    attribute that is part of the object, such as ``__defaults__`` of a function. ``CONTEXT``: the
    value of a context variable.
    """

    NAME, FIELD, SLOT, KEY, ORDER = "name", "field", "slot", "key", "order"
    INDEX, NTH, CELL, PART, CONTEXT = "index", "nth", "cell", "part", "context"


Step = tuple[str, Any]
Items = list[tuple[Step, Any]]
Path = tuple[Any, ...]
"""The name of a module, then steps."""

Leaf = tuple[Any, ...]
"""An object as the one that holds it is compared: a kind of those below, and what is compared."""

CONSTANT, NAMED, GROUP, HELD = "constant", "named", "group", "held"
"""The kinds of leaves. ``GROUP``: a tuple or a property, which can only be replaced as a whole.
``HELD``: an object with a row of its own; the path of the row and its ``about`` follow."""

FUNCTION, CLASS, KEPT = "function", "class", "kept"
"""What ``about`` begins with for some objects. ``KEPT``: one that cannot be pickled."""

CONSTANTS: frozenset[type] = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype)
)

DESCRIPTORS = (staticmethod, classmethod, property)

LONG_CONTAINER, LONG_TEXT = 64, 1024
"""Containers of more constants than this, and longer texts, are described by a digest."""


class Row(NamedTuple):
    """An object that a module holds.

    ``about``: what makes it this object; where it differs, the object is replaced by another one.
    ``items``: what else it holds, by step; where they differ, they are set in the same object.
    """

    about: Any
    items: dict[Step, Leaf]


Rows = dict[str, dict[Path, Row]]
"""Module -> path -> row. Another process can receive and compare it."""


class Contents:
    """``rows``: the table. ``places``: the id of an object -> its path. ``codes``: those of the
    functions of the user.
    """

    def __init__(self, modules: Iterable[ModuleType] = ()) -> None:
        self.rows: Rows = {}
        self.places: dict[int, Path] = {}
        self.codes: set[CodeType] = set()
        self._module = ""
        self._abouts: dict[Path, Any] = {}
        self._objects: dict[Path, tuple[Any, Items | None]] = {}
        for module in modules:
            self.add(module)

    def add(self, module: ModuleType) -> None:
        """Describe one more module. Those that others import come first."""
        self._module = module.__name__
        path = (self._module,)
        items = items_of(module)
        for step, value in items:  # so that an object has its shortest path
            if not isinstance(value, WITHOUT_ROW) or (
                isinstance(value, FunctionType | type) and self._in_full(value)
            ):
                self.places.setdefault(id(value), (*path, step))
        self.rows[self._module] = {}
        self._add_row(module, path, "module", items)

    def put_back(self) -> None:
        """Let each of these objects hold again what it held when it was described."""
        for owner, items in self._objects.values():
            if items is None:
                continue
            now = dict(items_of(owner))
            if isinstance(owner, list):
                values = [value for (kind, _), value in items if kind == Kind.INDEX]
                list.__setitem__(owner, slice(None), values)
            for step in now.keys() - dict(items).keys():
                delete(owner, step)
            for step, value in items:
                present = now.get(step, MISSING)
                if present is not value and not (step[0] == Kind.ORDER and present == value):
                    write(owner, step, value)

    def _add_row(self, value: Any, path: Path, about: Any, items: Items | None) -> None:
        self._abouts[path] = about
        self._objects[path] = value, items
        leaves = {step: self._leaf(one, (*path, step)) for step, one in items or ()}
        self.rows[path[0]][path] = Row(about, leaves)

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
        if isinstance(value, FunctionType | type) and not self._in_full(value):
            return NAMED, value.__module__, value.__qualname__
        if isinstance(value, DESCRIPTORS):
            names = ("fget", "fset", "fdel") if isinstance(value, property) else ("__func__",)
            parts = [((Kind.PART, name), getattr(value, name)) for name in names]
            return GROUP, kind.__name__, *self._leaves(parts, path)
        if isinstance(value, tuple):
            held = list(tuple.__iter__(value))
            long = _digest_if_long(held)
            return GROUP, *_type(value), *(long or self._leaves(_by_index(held), path))
        path = self.places.setdefault(id(value), path)
        if path not in self._objects:
            self._objects[path] = value, None
            try:
                about, items = self._object(value, path)
            except Exception:  # its class may raise anything when it is pickled
                about, items = (KEPT, *_type(value)), None
            self._add_row(value, path, about, items)
        return HELD, path, self._abouts.get(path)  # None: it holds itself

    def _leaves(self, items: Iterable[tuple[Step, Any]], path: Path) -> Iterator[Leaf]:
        for step, value in items:
            yield self._leaf(value, (*path, step))

    def _in_full(self, value: Any) -> bool:
        """True for what belongs to the module at hand, and for what has no name elsewhere."""
        return value.__module__ == self._module or is_pickled_by_value(value)

    def _object(self, value: Any, path: Path) -> tuple[Any, Items | None]:
        """Its ``about``, and the items that can be set in it, if any can."""
        name = _type(value)
        if isinstance(value, FunctionType):
            self.codes.add(value.__code__)
            code = of_code(value.__code__)
            return (FUNCTION, value.__module__, value.__qualname__, code), items_of(value)
        if isinstance(value, type):
            bases = tuple((base.__module__, base.__qualname__) for base in value.__bases__)
            return (CLASS, value.__module__, value.__qualname__, bases), items_of(value)
        if isinstance(value, Tensor):
            shape = tuple(value.shape), value.dtype, str(value.device), value.requires_grad
            return (*name, *shape, of_tensor(value)), None
        if isinstance(value, io.IOBase):
            return (KEPT, "file"), None
        if isinstance(value, OF_THIS_PROCESS):
            return (KEPT, *name), None
        if isinstance(value, MappingProxyType):
            return (*name, _digest_of(dict(value))), None
        if isinstance(value, set | frozenset):
            return (*name, frozenset(map(_element, _base(value).__iter__(value)))), None
        if not has_plain_state(value) and not isinstance(value, ContextVar):
            try:
                return (*name, _digest_of(value)), None
            except Exception:
                if not hasattr(value, "__dict__"):
                    raise
        has_items = isinstance(value, dict | list)
        if has_items and not _fields(value) and (long := _digest_if_long(contents(value))):
            return (*name, *long), None
        if isinstance(value, dict) and not _has_plain_keys(value):
            return (*name, *self._leaves(items_of(value), path)), None
        if isinstance(value, list):
            name = (*name, list.__len__(value))  # type: ignore[assignment]
        if not (has_items or hasattr(value, "__dict__") or isinstance(value, ContextVar)):
            value.__reduce_ex__(5)  # raises an error for a lock
        return name, items_of(value)


WITHOUT_ROW: tuple[type, ...] = (
    *(*CONSTANTS, *DESCRIPTORS, tuple),
    *(ModuleType, FunctionType, BuiltinFunctionType, type),
)
"""Types of which most objects are described by a leaf alone."""

MISSING: Any = object()
"""Stands for a value that does not exist."""


def _constant(value: Any) -> Leaf:
    name = type(value).__name__
    if isinstance(value, str | bytes) and len(value) > LONG_TEXT:
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return CONSTANT, name, len(value), _digest(data)
    return CONSTANT, name, repr(value) if isinstance(value, float | complex) else value


def _type(value: object) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _by_index(values: Iterable[Any]) -> Items:
    return [((Kind.INDEX, number), value) for number, value in enumerate(values)]


def _element(value: Any) -> Hashable:
    return _constant(value) if type(value) in CONSTANTS else (*_type(value), _digest_of(value))


# What an object holds, step by step, and how to read and to write it.


def items_of(owner: Any) -> Items:
    """All that can be set in this object."""
    if isinstance(owner, ModuleType):
        return list(_globals(owner))
    if isinstance(owner, type):
        names = vars(owner).items()
        return [((Kind.NAME, name), value) for name, value in names if _counts(name, value)]
    if isinstance(owner, FunctionType):
        items: Items = [
            *(((Kind.PART, name), getattr(owner, name)) for name in _PARTS_OF_FUNCTION),
            *(((Kind.FIELD, name), value) for name, value in sorted(vars(owner).items())),
        ]
        for number, cell in enumerate(owner.__closure__ or ()):
            try:
                items.append(((Kind.CELL, number), cell.cell_contents))
            except ValueError:  # the variable has no value yet
                continue
        return items
    if isinstance(owner, ContextVar):
        return [((Kind.CONTEXT, "value"), owner.get())] if owner in copy_context() else []
    if isinstance(owner, dict):
        pairs = contents(owner)
        if _has_plain_keys(owner):
            items = [((Kind.KEY, key), value) for key, value in pairs]
            return [*items, *_fields(owner), ((Kind.ORDER, ""), tuple(key for key, _ in pairs))]
        flat = [one for pair in pairs for one in pair]
        return [((Kind.NTH, number), one) for number, one in enumerate(flat)] + _fields(owner)
    if isinstance(owner, list):
        return _by_index(contents(owner)) + _fields(owner)
    return _fields(owner)


_PARTS_OF_FUNCTION = ("__defaults__", "__kwdefaults__")

SET_BY_TORCH = frozenset({"_autograd_function_id"})
"""A number that torch gives to every subclass of ``torch.autograd.Function``, in turn."""


def _globals(module: ModuleType) -> Iterator[tuple[Step, Any]]:
    for name, value in list(vars(module).items()):
        if not _counts(name, value) or not name.isidentifier():
            continue
        if isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}":
            continue  # it is there as soon as anybody has imported it
        yield (Kind.NAME, name), value


def _counts(name: str, value: object) -> bool:
    """False for names that Python, decorators and torch set for themselves."""
    if name in SET_BY_TORCH:
        return False
    if name.startswith("__") and name.endswith("__"):
        return isinstance(value, (FunctionType, *DESCRIPTORS))
    return True


def _fields(value: Any) -> Items:
    """Everything in the object's ``__dict__`` and slots."""
    fields = getattr(value, "__dict__", {})
    held: Items = [((Kind.FIELD, name), fields[name]) for name in fields]
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # pickle uses it too
    for name in names:
        try:
            held.append(((Kind.SLOT, name), object.__getattribute__(value, name)))
        except AttributeError:  # the slot has no value
            continue
    return held


def has_plain_state(value: Any) -> bool:
    """True if the object is pickled as its ``__dict__`` and slots, and perhaps its items."""
    cls: Any = type(value)
    plain: Any = object
    return (
        cls.__reduce_ex__ is plain.__reduce_ex__
        and cls.__reduce__ in _PLAIN_REDUCE
        and cls.__getstate__ is plain.__getstate__
        and cls not in copyreg.dispatch_table
        and not any(hasattr(cls, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
    )


_PLAIN_REDUCE = tuple(cls.__reduce__ for cls in (object, OrderedDict, defaultdict, Counter))
"""How objects are pickled whose items and ``__dict__`` are all that they hold."""


def _has_plain_keys(owner: dict[Any, Any]) -> bool:
    return all(map(_is_plain_key, dict.__iter__(owner)))


def _is_plain_key(key: Any) -> bool:
    return type(key) in CONSTANTS or (type(key) is tuple and all(map(_is_plain_key, key)))


def _base(container: Any) -> Any:
    """The builtin type of a container, whose methods do what a subclass may have changed."""
    bases = (OrderedDict, dict, list, tuple, set, frozenset)
    return next(base for base in bases if isinstance(container, base))


def contents(container: Any) -> list[Any]:
    """All that a list or a dict holds; of a dict the pairs of key and value."""
    base = _base(container)
    return list(base.items(container) if isinstance(container, dict) else base.__iter__(container))


def read(owner: Any, steps: Path) -> Any:
    """The value at the end of these steps. Raises an error of any type if there is none."""
    for kind, key in steps:
        match kind:
            case Kind.NAME:
                owner = vars(owner)[key]
            case Kind.FIELD:
                owner = owner.__dict__[key]
            case Kind.SLOT:
                owner = object.__getattribute__(owner, key)
            case Kind.KEY | Kind.INDEX:
                owner = _base(owner).__getitem__(owner, key)
            case Kind.NTH:
                owner = contents(owner)[key // 2][key % 2]
            case Kind.ORDER:
                owner = tuple(_base(owner).__iter__(owner))
            case Kind.CELL:
                owner = owner.__closure__[key].cell_contents
            case Kind.CONTEXT:
                owner = owner.get()
            case _:
                owner = getattr(owner, key)
    return owner


def write(owner: Any, step: Step, value: Any) -> None:
    """Set what one step leads to."""
    kind, key = step
    match kind:
        case Kind.NAME if isinstance(owner, ModuleType):
            vars(owner)[key] = value
        case Kind.NAME:
            type.__setattr__(owner, key, value)
        case Kind.FIELD:
            owner.__dict__[key] = value
        case Kind.SLOT:
            object.__setattr__(owner, key, value)
        case Kind.KEY | Kind.INDEX:
            _base(owner).__setitem__(owner, key, value)
        case Kind.ORDER:
            base = _base(owner)
            for one in value:
                if base.__contains__(owner, one):
                    held = base.__getitem__(owner, one)
                    base.__delitem__(owner, one)
                    base.__setitem__(owner, one, held)
        case Kind.CELL:
            owner.__closure__[key].cell_contents = value
        case Kind.CONTEXT:
            owner.set(value)
        case _:
            setattr(owner, key, value)


def delete(owner: Any, step: Step) -> None:
    """Delete what one step leads to, where that is possible."""
    kind, key = step
    match kind:
        case Kind.NAME if isinstance(owner, ModuleType):
            vars(owner).pop(key)
        case Kind.NAME:
            type.__delattr__(owner, key)
        case Kind.FIELD:
            del owner.__dict__[key]
        case Kind.SLOT:
            object.__delattr__(owner, key)
        case Kind.KEY:
            _base(owner).__delitem__(owner, key)


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
        match kind:
            case Kind.KEY | Kind.INDEX:
                words.append(f"[{key!r}]")
            case Kind.NTH:
                words.append(f"[{('key', 'value')[key % 2]} {key // 2}]")
            case Kind.CELL:
                words.append(f".__closure__[{key}]")
            case _:
                words.append(f".{key}")
    return "".join(words)


# Where two tables differ, and the edits that make one process like the other.


class Difference(NamedTuple):
    """An item that differs: ``wanted`` and ``present`` are its leaves, None where it is missing."""

    path: Path
    step: Step
    wanted: Leaf | None
    present: Leaf | None


class Edit(NamedTuple):
    """Set what ``step`` leads to from the object at ``path``, or delete it."""

    path: Path
    step: Step
    value: Any = None
    deletes: bool = False


class Pickled(NamedTuple):
    """The value of an edit that consists of constants only. Pickled with all else, each of them
    would take a microsecond.
    """

    data: bytes


def differences(wanted: Rows, present: Rows) -> Iterator[Difference]:
    """All that is to be edited in a process that is as ``present``, to make it as ``wanted`` says.

    Only modules that both describe are compared. An object that is replaced is replaced wherever it
    is held, since each leaf says which object it is.
    """
    for module, rows in wanted.items():
        for path, row in rows.items():
            there = present.get(module, {}).get(path)
            if there is None or there.about != row.about or there.items == row.items:
                continue
            for step in there.items.keys() - row.items.keys():
                yield Difference(path, step, None, there.items[step])
            for step, leaf in row.items.items():
                if there.items.get(step) != leaf:
                    yield Difference(path, step, leaf, there.items.get(step))


def apply(edits: Iterable[Edit]) -> None:
    """Make these edits in the modules of this process."""
    for owner, edit in [(resolve(edit.path), edit) for edit in edits]:
        if edit.deletes:
            delete(owner, edit.step)
        else:
            value = edit.value
            is_pickled = isinstance(value, Pickled)
            write(owner, edit.step, pickle.loads(value.data) if is_pickled else value)


def is_long(value: Any) -> bool:
    """True for a long container of constants."""
    return isinstance(value, dict | list | tuple) and bool(_digest_if_long(contents(value)))


# Digests of code and of objects, equal in two processes if what they hold is equal.

MAX_KNOWN_CODES = 20_000


OF_THIS_PROCESS = (
    *(ctypes.CDLL, ctypes._SimpleCData, ctypes._Pointer, ctypes.Structure, io.IOBase),
    *(weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
"""Types of objects that mean nothing in another process, even if they can be pickled.

Pytest also exchanges the standard streams for files of other types.
"""


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


def of_tensor(tensor: Tensor) -> bytes:
    """The digest of the elements of a tensor."""
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


def _digest_of(value: object) -> bytes:
    """The digest of an object, from what it would pickle itself as.

    Raises any error that its class raises.
    """
    sink = _Sink()
    pickler = _ObjectPickler(sink, protocol=5)
    pickler.fast = True  # without a memo, since which equal strings are identical is chance
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pickler.dump(value)
    return sink.hash.digest()


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class _Sink:
    """A file that keeps only the digest of what is written."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _ObjectPickler(pickle.Pickler):
    _inner = False

    def reducer_override(self, value: Any) -> Any:
        inner, self._inner = self._inner, True
        if value is bytes:
            return NotImplemented
        if isinstance(value, Tensor):
            return bytes, (of_tensor(value),)
        if isinstance(value, FunctionType | type):
            code = of_code(value.__code__) if isinstance(value, FunctionType) else b""
            return bytes, (repr((value.__module__, value.__qualname__, code)).encode(),)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            array = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return bytes, (repr((value.dtype, value.shape)).encode() + _digest(array.data),)
        if inner:
            try:
                value.__reduce_ex__(5)
                can_travel = not isinstance(value, OF_THIS_PROCESS)
            except Exception:  # a lock inside the object, for example
                can_travel = False
            if not can_travel:
                return bytes, (repr(type(value)).encode(),)
        return NotImplemented
