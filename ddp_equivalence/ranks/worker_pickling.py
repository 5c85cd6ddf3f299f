"""Lets a rank and its workers exchange objects of the classes and functions in a user's file.

Plain pickle sends the name of a class or function. In a training script the worker finds it under
this name. On a rank it was perhaps pickled by value, because it is part of a test file or of a file
given on the command line, and no process can import it there. Such a class or function is pickled
by value for the workers too. One that is defined inside a function is not, because pickle refuses
it in a training script as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import cloudpickle

from ddp_equivalence.ranks.code_files import dumps_with_files

_forking_pickler: Any = ForkingPickler
"""Pickle calls its method ``reducer_override``, which the class does not define, if it has one."""


def pickle_by_value_for_workers() -> None:
    """From now on, let multiprocessing pickle by value what no process can import."""
    _forking_pickler.reducer_override = _reduce


@contextmanager
def pickled_by_value_for_workers() -> Iterator[None]:
    """The same inside the block only, for a process that is a rank for a while."""
    before = ForkingPickler.__dict__.get("reducer_override")
    pickle_by_value_for_workers()
    try:
        yield
    finally:
        del _forking_pickler.reducer_override
        if before is not None:
            _forking_pickler.reducer_override = before


def _reduce(pickler: ForkingPickler, value: object) -> Any:
    """Called by pickle for every object. NotImplemented means that pickle goes on as usual."""
    if isinstance(value, FunctionType | type) and not _left_to_pickle(value):
        return _load, (dumps_with_files(value),)
    return NotImplemented


def _load(pickled: bytes) -> object:
    """Called in the other process. A new worker may later send such objects back."""
    pickle_by_value_for_workers()
    return cloudpickle.loads(pickled)


def _left_to_pickle(value: FunctionType | type) -> bool:
    """True if pickle sends the name, or refuses the value with a message that says why."""
    if "<" in value.__qualname__:
        return True  # a lambda or a local class
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value
