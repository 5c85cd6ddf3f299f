"""Reads what decides in a communication hook: the attributes of its state that it asks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from ddp_equivalence.measurement.calls import HookState

ASKING = (ast.If, ast.While, ast.IfExp)


def state_of_hook(hook: object, state: object) -> HookState | None:
    """What is known of a hook's state; None if it is no object with attributes."""
    if not hasattr(state, "__dict__") or inspect.isclass(state) or inspect.isroutine(state):
        return None
    return HookState(type(state).__name__, _arguments_of(type(state)), _asked_in(hook))


def _arguments_of(kind: type) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return ()


def _asked_in(hook: object) -> tuple[str, ...]:
    """The attributes of a hook's first argument that its conditions name."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(hook)))  # type: ignore[arg-type]
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return ()
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    first = names[1:2] if inspect.ismethod(hook) else names[:1]
    return tuple(dict.fromkeys(one for name in first for one in _asked(function, name)))


def _asked(function: ast.AST, state: str) -> Iterator[str]:
    for node in ast.walk(function):
        for part in ast.walk(node.test) if isinstance(node, ASKING) else ():
            base = part.value if isinstance(part, ast.Attribute) else None
            if isinstance(part, ast.Attribute) and isinstance(base, ast.Name) and base.id == state:
                yield part.attr
