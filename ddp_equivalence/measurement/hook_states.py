"""Reads what decides in a communication hook: the attributes of its state that it asks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from ddp_equivalence.measurement.calls import HookState

ASKING = (ast.If, ast.While, ast.IfExp)


def owner_of_numbers(hook: object, state: object) -> object:
    """The object whose numbers a hook may ask: its state, or what it is a method of."""
    if _has_attributes(state):
        return state
    bound = getattr(_called(hook), "__self__", None)
    return bound if _has_attributes(bound) else None


def state_of_hook(hook: object, state: object) -> HookState | None:
    """What is known of this object; None if it is no object with attributes."""
    owner = owner_of_numbers(hook, state)
    if owner is None:
        return None
    first = 0 if owner is not state or not inspect.ismethod(_called(hook)) else 1
    return HookState(type(owner).__name__, _arguments_of(type(owner)), _asked_in(hook, first))


def _called(hook: object) -> object:
    """The function or method that runs when a hook is called."""
    return hook if inspect.isroutine(hook) else getattr(hook, "__call__", hook)  # noqa: B004


def attributes_of(owner: object) -> dict[str, Any]:
    """The attributes of an object, also those in slots."""
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    return {**found, **getattr(owner, "__dict__", {})}


def _has_attributes(owner: object) -> bool:
    if inspect.isclass(owner) or inspect.isroutine(owner) or inspect.ismodule(owner):
        return False
    return hasattr(owner, "__dict__") or bool(getattr(type(owner), "__slots__", ()))


def _arguments_of(kind: type) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return ()


def _asked_in(hook: object, argument: int) -> tuple[str, ...]:
    """The attributes of an argument of a hook, with this number, that its conditions name."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(_called(hook))))  # type: ignore[arg-type]
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return ()
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    asked = (one for name in names[argument : argument + 1] for one in _asked(function, name))
    return tuple(dict.fromkeys(asked))


def _asked(function: ast.AST, state: str) -> Iterator[str]:
    for node in ast.walk(function):
        for part in ast.walk(node.test) if isinstance(node, ASKING) else ():
            base = part.value if isinstance(part, ast.Attribute) else None
            if isinstance(part, ast.Attribute) and isinstance(base, ast.Name) and base.id == state:
                yield part.attr
