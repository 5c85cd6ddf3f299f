"""What a script holds in Python and in generators, and in no weight, buffer or batch."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from ddp_equivalence.measurement.code_lines import is_users
from ddp_equivalence.observed_scripts.query import STATE

MOST, MOST_PARTS = 200, 20
"""Of all values, and of those in one container: the script waits while they are read."""


def held_in_python(module: nn.Module) -> dict[str, str]:
    """The states of generators, and the numbers in variables, in what objects, dicts and lists in
    variables hold, and in attributes of the module that is called: each as a text that is short.
    """
    found = dict[str, str]()
    for name, value in _values(module):
        if len(found) < MOST and (text := _text(value)):
            found.setdefault(name, text)
    return found


def _values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield "random", random
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "numpy.random", numpy.random.mtrand._rand
    for name, inner in module.named_modules():
        if not type(inner).__module__.startswith("torch."):
            for attribute, value in _attributes(inner):
                where = f"{type(module).__name__}.{name}.{attribute}".replace("..", ".")
                yield from _with_parts(where, value, deep=2)
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if is_users(frame.f_code.co_filename):
            for name, value in list(frame.f_locals.items()):
                yield from _with_parts(name, value, deep=3)


def _with_parts(name: str, value: Any, deep: int) -> Iterator[tuple[str, Any]]:
    """The value, and what it holds, down to so many levels."""
    yield name, value
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        parts = ((f"[{k!r}]", one) for k, one in value.items() if isinstance(k, str | int))
    elif isinstance(value, list | deque):
        parts = ((f"[{k}]", one) for k, one in enumerate(value))
    elif _is_of_users(type(value)):
        parts = ((f".{k}", one) for k, one in _attributes(value))
    for part, one in islice(parts, MOST_PARTS) if deep else ():
        yield from _with_parts(name + part, one, deep - 1)


def _attributes(of: Any) -> Iterator[tuple[str, Any]]:
    """Without the modules of a module, whose names are attributes too."""
    return ((k, one) for k, one in getattr(of, "__dict__", {}).items() if k != "_modules")


def _is_of_users(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_users(file)


def _text(value: Any) -> str:
    """A number, or a digest of the state of a generator; "" for anything else."""
    if isinstance(value, int | float):
        return f"{value:.6g}"
    if isinstance(value, torch.Generator):
        state: Any = value.get_state().tolist()
    elif isinstance(value, random.Random) or value is random:
        state = value.getstate()
    elif type(value).__module__.startswith("numpy.random"):
        state = getattr(value, "bit_generator", None) or value._bit_generator
        state = repr(state.state)
    else:
        return ""
    return STATE + hashlib.sha256(repr(state).encode()).hexdigest()[:8]
