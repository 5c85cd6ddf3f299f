"""A path leads from a module to a value in it: step by step, on the caller and on a rank alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

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
