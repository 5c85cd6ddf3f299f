"""Describes what modules hold, as plain data that another process can compare."""

from __future__ import annotations

import copyreg
import ctypes
import hashlib
import io
import pickle
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from importlib import import_module
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.ranks.importable import is_pickled_by_value

# Describes what modules hold, as plain data that can be compared with that of another process.
#
# Functions and classes of installed packages are described by their names, those of the user's
# modules by their code and everything that they hold, and objects by their attributes. What
# cannot be pickled, such as a lock, is described by its type.

CONSTANTS = frozenset((bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype))

CODED = (FunctionType, type)
"""Types of objects that are described by their code or by their name."""

DESCRIPTORS = (staticmethod, classmethod, property)

LONG_CONTAINER = 64
"""A longer container is described by a digest if it holds nothing but constants."""

LONG_TEXT = 1024
"""A longer text is described by a digest."""


class Description:
    """``nodes``: a node for each module. ``seen``: (where an object was met again, its path).

    ``places``: the id of an object -> its path. ``functions``: the codes of the user's functions.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.seen: list[tuple[Path, Path]] = []
        self.places: dict[int, Path] = {}
        self.functions: set[CodeType] = set()
        self._kept_alive: list[object] = []
        self._module = ""

    def __reduce__(self) -> Any:
        # Another process gets only what it can compare.
        return _received, (self.nodes, self.seen)

    def add(self, module: ModuleType) -> None:
        """Describe one more module."""
        self._module = module.__name__
        children = self._children(_globals(module), (self._module,))
        self.nodes[self._module] = MODULE, "", tuple(children)

    def _children(self, values: Iterable[tuple[Step, Any]], path: Path) -> Iterator[Any]:
        for step, value in values:
            yield step, self._node(value, (*path, step))

    def _node(self, value: Any, path: Path) -> Node:
        kind = type(value)
        if kind in CONSTANTS:
            return CONSTANT, _constant(value), ()
        if isinstance(value, ModuleType):
            return NAMED, ("module", value.__name__), ()
        if id(value) in self.places:
            self.seen.append((path, self.places[id(value)]))
            return SEEN, self.places[id(value)], ()
        if isinstance(value, BuiltinFunctionType) and isinstance(
            getattr(value, "__self__", None), ModuleType | type(None)
        ):
            return NAMED, (value.__module__, value.__qualname__), ()
        if isinstance(value, CODED):
            if not self._in_full(value):
                return NAMED, (value.__module__, value.__qualname__), ()
            self._remember(value, path)
            if isinstance(value, FunctionType):
                return self._function(value, path)
            return self._class(value, path)
        if isinstance(value, DESCRIPTORS):
            names = ("fget", "fset", "fdel") if isinstance(value, property) else ("__func__",)
            parts = [((PART, name), getattr(value, name)) for name in names]
            return PART_OF_CLASS, kind.__name__, tuple(self._children(parts, path))
        if kind is tuple or isinstance(value, tuple):
            return self._tuple(value, path)
        self._remember(value, path)
        try:
            return self._object(value, path)
        except Exception:  # its class may raise anything when it is pickled
            return KEPT, _type_name(value), ()

    def _remember(self, value: object, path: Path) -> None:
        self.places[id(value)] = path
        self._kept_alive.append(value)

    def _in_full(self, value: Any) -> bool:
        """True for what belongs to the module at hand, and for what has no name elsewhere."""
        return value.__module__ == self._module or is_pickled_by_value(value)

    def _function(self, function: FunctionType, path: Path) -> Node:
        self.functions.add(function.__code__)
        values: list[tuple[Step, Any]] = [
            ((PART, "__defaults__"), function.__defaults__),
            ((PART, "__kwdefaults__"), function.__kwdefaults__),
            *(((FIELD, name), value) for name, value in sorted(vars(function).items())),
        ]
        for number, cell in enumerate(function.__closure__ or ()):
            try:
                values.append(((CELL, number), cell.cell_contents))
            except ValueError:  # the variable has no value yet
                continue
        what = function.__module__, function.__qualname__, of_code(function.__code__)
        return FUNCTION, what, tuple(self._children(values, path))

    def _class(self, cls: type, path: Path) -> Node:
        values = [
            ((NAME, name), value) for name, value in vars(cls).items() if _counts(name, value)
        ]
        bases = tuple((base.__module__, base.__qualname__) for base in cls.__bases__)
        what = cls.__module__, cls.__qualname__, bases
        return CLASS, what, tuple(self._children(values, path))

    def _tuple(self, value: Any, path: Path) -> Node:
        items: list[Any] = list(tuple.__iter__(value))
        node = self._long(value, items) or (
            TUPLE,
            _type_name(value),
            tuple(self._children((((INDEX, n), one) for n, one in enumerate(items)), path)),
        )
        if any(child[0] != CONSTANT for _, child in node[2]):
            self._remember(value, path)  # equal constants may be one object by chance
        return node

    def _object(self, value: Any, path: Path) -> Node:
        what = _type_name(value)
        if isinstance(value, Tensor):
            about = what, value.dtype, str(value.device), tuple(value.shape), value.requires_grad
            return TENSOR, (about, of_tensor(value)), ()
        if isinstance(value, io.IOBase):
            return KEPT, "file", ()
        if isinstance(value, OF_THIS_PROCESS):
            return KEPT, what, ()
        if isinstance(value, ContextVar):
            held = [((IN_CONTEXT, "value"), value.get())] if value in copy_context() else []
            return OBJECT, what, tuple(self._children(held, path))
        if isinstance(value, MappingProxyType):
            return self._digest(value, dict(value))
        if isinstance(value, set | frozenset):
            elements = frozenset(map(self._element, contents(value)))
            return SET, (_type_and_kind(value), elements), ()
        if not has_plain_state(value):
            try:
                return self._digest(value, value)
            except Exception:
                if not hasattr(value, "__dict__"):
                    raise
        held = fields_of(value)
        if isinstance(value, dict):
            items: Any = contents(value)
            node = None if held else self._long(value, items)
            held = [*_items(items), *held]
            return node or (DICT, what, tuple(self._children(held, path)))
        if isinstance(value, list):
            items = contents(value)
            node = None if held else self._long(value, items)
            by_index: list[tuple[Step, Any]] = [((INDEX, n), one) for n, one in enumerate(items)]
            held = by_index + held
            return node or (LIST, what, tuple(self._children(held, path)))
        if not hasattr(value, "__dict__"):
            value.__reduce_ex__(5)  # raises an error for a lock
        return OBJECT, what, tuple(self._children(held, path))

    def _digest(self, value: object, content: object) -> Node:
        return DIGEST, (_type_name(value), of_object(content, self._digest_of_function)), ()

    def _long(self, value: Any, items: list[Any]) -> Node | None:
        if len(items) <= LONG_CONTAINER:
            return None
        try:
            return MANY, (_type_and_kind(value), len(items), of_plain(items)), ()
        except NotPlain:
            return None

    def _element(self, value: Any) -> Hashable:
        if type(value) in CONSTANTS:
            return _constant(value)
        return _type_name(value), of_object(value, self._digest_of_function)

    def _digest_of_function(self, value: Any) -> bytes:
        code = of_code(value.__code__) if isinstance(value, FunctionType) else b""
        return repr((value.__module__, value.__qualname__, code)).encode()


def describe(modules: Sequence[ModuleType]) -> Description:
    """Describe these modules, those first that the others import."""
    description = Description()
    for module in modules:
        description.add(module)
    return description


def _received(nodes: dict[str, Node], seen: list[tuple[Path, Path]]) -> Description:
    description = Description()
    description.nodes, description.seen = nodes, seen
    return description


def _globals(module: ModuleType) -> Iterator[tuple[Step, Any]]:
    for name, value in list(vars(module).items()):
        if not _counts(name, value) or not name.isidentifier():
            continue
        if isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}":
            continue  # it is there as soon as anybody has imported it
        yield (NAME, name), value


SET_BY_TORCH = frozenset({"_autograd_function_id"})
"""A number that torch gives to every subclass of ``torch.autograd.Function``, in turn."""


def _counts(name: str, value: object) -> bool:
    """False for names that Python, decorators and torch set for themselves."""
    if name in SET_BY_TORCH:
        return False
    if name.startswith("__") and name.endswith("__"):
        return isinstance(value, (FunctionType, *DESCRIPTORS))
    return True


def _constant(value: Any) -> Hashable:
    if isinstance(value, str | bytes) and len(value) > LONG_TEXT:
        return type(value).__name__, len(value), of_plain([value])
    return type(value).__name__, repr(value) if isinstance(value, float | complex) else value


def _items(items: list[tuple[Any, Any]]) -> Iterator[tuple[Step, Any]]:
    if all(_is_plain_key(key) for key, _ in items):
        yield from (((KEY, key), value) for key, value in items)
        return
    for number, (key, value) in enumerate(items):
        yield (NTH_KEY, number), key
        yield (NTH_VALUE, number), value


def _is_plain_key(key: Any) -> bool:
    return type(key) in CONSTANTS or (type(key) is tuple and all(map(_is_plain_key, key)))


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _type_and_kind(container: object) -> Hashable:
    return _type_name(container), isinstance(container, tuple | frozenset)


# Reads what an object holds in its attributes, as pickle would.


def fields_of(value: Any) -> list[tuple[Step, Any]]:
    """Everything in the object's ``__dict__`` and slots."""
    fields = getattr(value, "__dict__", {})
    held: list[tuple[Step, Any]] = [((FIELD, name), fields[name]) for name in fields]
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # pickle uses it too
    for name in names:
        try:
            held.append(((SLOT, name), object.__getattribute__(value, name)))
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


# Digests of code and of objects, equal in two processes if what they hold is equal.

MAX_KNOWN_CODES = 20_000


class NotPlain(Exception):
    """A container holds something else than constants and containers of them."""


OF_THIS_PROCESS = (
    *(io.IOBase, ctypes.CDLL, ctypes._SimpleCData, ctypes._Pointer, ctypes.Structure),
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


def of_plain(container: object) -> bytes:
    """The digest of a container that holds only constants and containers.

    Raises NotPlain for any other one. This runs at the speed of C.
    """
    sink = _Sink()
    pickler = _PlainPickler(sink, protocol=5)
    pickler.fast = True  # without a memo, since which equal strings are identical is chance
    try:
        pickler.dump(container)
    except (ValueError, RecursionError) as error:  # it contains itself
        raise NotPlain from error
    return sink.hash.digest()


def of_tensor(tensor: Tensor) -> bytes:
    """The digest of the elements of a tensor."""
    dense = tensor.detach().cpu() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _digest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def of_object(value: object, of_function: Callable[[Any], bytes]) -> bytes:
    """The digest of an object, from what it would pickle itself as.

    Raises any error that its class raises. ``of_function`` gives the digest of a function or class
    that is not pickled as its name.
    """
    sink = _Sink()
    pickler = _ObjectPickler(sink, of_function, protocol=5)
    pickler.fast = True
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


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        raise NotPlain


class _ObjectPickler(pickle.Pickler):
    def __init__(self, sink: _Sink, of_function: Callable[[Any], bytes], protocol: int) -> None:
        super().__init__(sink, protocol)
        self._of_function = of_function
        self._outermost = True

    def reducer_override(self, value: Any) -> Any:
        outermost, self._outermost = self._outermost, False
        if value is bytes:
            return NotImplemented
        if isinstance(value, Tensor):
            return bytes, (of_tensor(value),)
        if isinstance(value, FunctionType | type):
            return bytes, (self._of_function(value),)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            array = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return bytes, (repr((value.dtype, value.shape)).encode() + _digest(array.data),)
        if not outermost:
            try:
                value.__reduce_ex__(5)
                can_travel = not isinstance(value, OF_THIS_PROCESS)
            except Exception:  # a lock inside the object, for example
                can_travel = False
            if not can_travel:
                return bytes, (repr(type(value)).encode(),)
        return NotImplemented


# A path leads from a module to a value in it: step by step, on the caller and on a rank alike.

NAME, FIELD, SLOT, KEY, INDEX, NTH_KEY, NTH_VALUE, CELL, PART, IN_CONTEXT = (
    *("name", "field", "slot", "key", "index", "nth key", "nth value", "cell", "part"),
    "in context",
)
"""The kinds of steps.

``NAME``: a global of a module or an attribute of a class. ``FIELD``: an entry of ``__dict__`` of
any other object. ``NTH_KEY``, ``NTH_VALUE``: of a dict with keys that have no plain value.
``CELL``: a variable of a closure, by number. ``PART``: any attribute that is part of the object,
such as ``__defaults__`` of a function. ``IN_CONTEXT``: the value of a context variable.
"""

Step = tuple[str, Any]
Path = tuple[Any, ...]
"""The name of a module, then steps."""

MISSING: Any = object()
"""Stands for a value that does not exist."""


@dataclass(frozen=True)
class _Kind:
    """How to read a step, and how to set and delete what it leads to, if that is possible."""

    read: Callable[[Any, Any], Any]
    set: Callable[[Any, Any, Any], object] | None = None
    delete: Callable[[Any, Any], object] | None = None


def _base(container: Any) -> Any:
    """The builtin type of a container, whose methods do what a subclass may have changed."""
    bases = (OrderedDict, dict, list, tuple, set, frozenset)
    return next(base for base in bases if isinstance(container, base))


def _set_name(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, ModuleType):
        vars(owner)[name] = value
    else:
        type.__setattr__(owner, name, value)


def _delete_name(owner: Any, name: str) -> None:
    if isinstance(owner, ModuleType):
        vars(owner).pop(name)
    else:
        type.__delattr__(owner, name)


def _set_cell(function: Any, number: int, value: Any) -> None:
    function.__closure__[number].cell_contents = value


_KINDS = {
    NAME: _Kind(lambda owner, name: vars(owner)[name], _set_name, _delete_name),
    FIELD: _Kind(
        lambda owner, name: owner.__dict__[name],
        lambda owner, name, value: owner.__dict__.__setitem__(name, value),
        lambda owner, name: owner.__dict__.__delitem__(name),
    ),
    SLOT: _Kind(object.__getattribute__, object.__setattr__, object.__delattr__),
    KEY: _Kind(
        lambda owner, key: dict.__getitem__(owner, key),
        lambda owner, key, value: _base(owner).__setitem__(owner, key, value),
        lambda owner, key: _base(owner).__delitem__(owner, key),
    ),
    INDEX: _Kind(
        lambda owner, index: _base(owner).__getitem__(owner, index),
        lambda owner, index, value: list.__setitem__(owner, index, value),
    ),
    NTH_KEY: _Kind(lambda owner, number: contents(owner)[number][0]),
    NTH_VALUE: _Kind(lambda owner, number: contents(owner)[number][1]),
    CELL: _Kind(lambda function, number: function.__closure__[number].cell_contents, _set_cell),
    PART: _Kind(getattr, setattr),
    IN_CONTEXT: _Kind(lambda owner, _: owner.get(), lambda owner, _, value: owner.set(value)),
}


def read(root: Any, steps: Path) -> Any:
    """The value at the end of these steps. Raises an error of any type if there is none."""
    for kind, key in steps:
        root = _KINDS[kind].read(root, key)
    return root


def read_or_missing(root: Any, steps: Path) -> Any:
    """The value at the end of these steps, or ``MISSING``."""
    try:
        return read(root, steps)
    except Exception:  # a property of the user may raise anything
        return MISSING


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


def write(owner: Any, step: Step, value: Any) -> None:
    """Set or, for ``MISSING``, delete what one step leads to."""
    kind, key = step
    if value is MISSING:
        delete = _KINDS[kind].delete
        assert delete is not None
        delete(owner, key)
    else:
        set_value = _KINDS[kind].set
        assert set_value is not None
        set_value(owner, key, value)


def contents(container: Any) -> list[Any]:
    """All that a list, a set or a dict holds; of a dict the pairs of key and value."""
    base = _base(container)
    return list(base.items(container) if isinstance(container, dict) else base.__iter__(container))


def replace_contents(container: Any, items: list[Any]) -> None:
    """Let a list, a set or a dict hold these items, which ``contents`` returned."""
    base = _base(container)
    base.clear(container)
    if isinstance(container, list):
        base.extend(container, items)
    elif isinstance(container, dict):
        for key, value in items:
            base.__setitem__(container, key, value)
    else:
        base.update(container, items)


def prefixes(path: Path) -> Iterator[Path]:
    """The path itself, and every path that leads towards it."""
    for length in range(len(path), 0, -1):
        yield path[:length]


def text(path: Path) -> str:
    """The path as a user writes it, such as ``train.SETTINGS['average']``."""
    words = [path[0]]
    for kind, key in path[1:]:
        if kind in (KEY, INDEX):
            words.append(f"[{key!r}]")
        elif kind in (NTH_KEY, NTH_VALUE):
            words.append(f"[{kind} {key}]")
        elif kind == CELL:
            words.append(f".__closure__[{key}]")
        else:
            words.append(f".{key}")
    return "".join(words)


# A node is the description of one value, as plain data that another process can compare.

Node = tuple[str, Hashable, tuple[tuple[Step, Any], ...]]
"""(Kind, what is compared, the nodes of what it holds by step)."""

CONSTANT, SEEN, NAMED, FUNCTION, CLASS, PART_OF_CLASS, MODULE = (
    *("constant", "seen", "named", "function", "class", "part of class", "module"),
)
DICT, LIST, TUPLE, SET, MANY, OBJECT, TENSOR, DIGEST, KEPT = (
    *("dict", "list", "tuple", "set", "many", "object", "tensor", "digest", "kept"),
)
"""The kinds of nodes. ``SEEN``: the object was already described, under the path that is compared.

``MANY``: a long container of constants. ``KEPT``: an object that cannot be pickled.
"""
