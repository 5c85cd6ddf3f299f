"""Describes what modules hold, as plain data that can be compared with that of another process.

Functions and classes of installed packages are described by their names, those of the user's
modules by their code and everything that they hold, and objects by their attributes. What cannot be
pickled, such as a lock, is described by its type.
"""

from __future__ import annotations

import io
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.ranks.importable import is_pickled_by_value
from ddp_equivalence.ranks.user_modules import digests
from ddp_equivalence.ranks.user_modules.nodes import (
    CLASS,
    CONSTANT,
    DICT,
    DIGEST,
    FUNCTION,
    KEPT,
    LIST,
    MANY,
    MODULE,
    NAMED,
    OBJECT,
    PART_OF_CLASS,
    SEEN,
    SET,
    TENSOR,
    TUPLE,
    Node,
)
from ddp_equivalence.ranks.user_modules.object_state import fields_of, has_plain_state
from ddp_equivalence.ranks.user_modules.paths import (
    CELL,
    FIELD,
    IN_CONTEXT,
    INDEX,
    KEY,
    NAME,
    NTH_KEY,
    NTH_VALUE,
    PART,
    Path,
    Step,
    contents,
)

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
        what = function.__module__, function.__qualname__, digests.of_code(function.__code__)
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
            return TENSOR, (about, digests.of_tensor(value)), ()
        if isinstance(value, io.IOBase):
            return KEPT, "file", ()
        if isinstance(value, digests.OF_THIS_PROCESS):
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
        return DIGEST, (_type_name(value), digests.of_object(content, self._digest_of_function)), ()

    def _long(self, value: Any, items: list[Any]) -> Node | None:
        if len(items) <= LONG_CONTAINER:
            return None
        try:
            return MANY, (_type_and_kind(value), len(items), digests.of_plain(items)), ()
        except digests.NotPlain:
            return None

    def _element(self, value: Any) -> Hashable:
        if type(value) in CONSTANTS:
            return _constant(value)
        return _type_name(value), digests.of_object(value, self._digest_of_function)

    def _digest_of_function(self, value: Any) -> bytes:
        code = digests.of_code(value.__code__) if isinstance(value, FunctionType) else b""
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
        return type(value).__name__, len(value), digests.of_plain([value])
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
