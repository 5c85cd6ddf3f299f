"""Pickles functions for the ranks, lambdas and closures too, whatever pytest's import mode is."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch.optim import Optimizer

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.ranks import module_contents
from ddp_equivalence.ranks.importable import is_pickled_by_value, modules_pickled_by_value
from ddp_equivalence.ranks.module_contents import CONSTANTS, Edit
from ddp_equivalence.ranks.process_state import Surroundings
from ddp_equivalence.ranks.user_modules import NO_CHANGES, Changes, changes_in

# Pickles functions by value, with the names of the files that they stand in.
#
# cloudpickle 3.1.3 leaves these names out. Without them nothing that happens in such a function
# has a line: neither a fault that a report shows, nor the lines of a traceback.
#
# Source: cloudpickle 3.1.3, ``_code_reduce``, where every file is called ``<dynamic-code>``.


class CloudPicklerWithFiles(cloudpickle.CloudPickler):  # type: ignore[misc]  # it is not typed
    """Pickles code together with the name of its file, whatever version of cloudpickle this is."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is CodeType:
            make, arguments = self.dispatch_table[CodeType](value)
            return _code_in_file, (make, arguments, value.co_filename)
        if type(value) is FunctionType and getattr(value, "hooked", False):
            return _hooked_step, (value.__wrapped__,)  # type: ignore[attr-defined]
        return super().reducer_override(value)


def _hooked_step(step: Any) -> Any:
    """The step of an optimizer's class, with torch's hooks of the process that loads it.

    Torch replaces ``step`` when the first optimizer of a class is made. Pickled by value, this
    function would have its own copy of all global hooks.
    """
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return hooked


def dumps_with_files(value: object) -> bytes:
    """What ``cloudpickle.loads`` makes the object of."""
    file = BytesIO()
    CloudPicklerWithFiles(file).dump(value)
    return file.getvalue()


def _code_in_file(make: Callable[..., CodeType], arguments: Any, file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


# A function of an importable module is pickled as its name. A function that the ranks cannot
# import under its name is pickled by value, with cloudpickle. Examples are a function of a test
# module under ``--import-mode=importlib``, and one of a file given on the command line.

NAMED = (FunctionType, type, ModuleType)
"""Objects of these types are not looked up by their place in a module, since they have names."""


def dumps(function: Callable[..., Any], argument: object) -> bytes:
    """Pickle a function and its argument, together with the state of this process.

    Functions and classes that the ranks cannot import are pickled by value. Raises BadCase if
    something has changed in an imported module that cannot be sent to the ranks.
    """
    work, found = (function, argument), _Found()
    changes = NO_CHANGES
    try:
        data = _cloudpickle(work, changes, found)
    except Exception:  # an object may have a lock, and be found in a module all the same
        if not found.modules:
            raise
        complete = False
    else:
        changes = changes_in(found.modules, found.codes)
        complete = not changes.edits and changes.places.keys().isdisjoint(map(id, found.objects))
    while not complete:
        known = found.modules | found.codes
        changes = changes_in(found.modules, found.codes)
        data = _pickle_with_edits(work, changes, found)
        complete = known >= found.modules | found.codes
    return pickle.dumps((Surroundings.here(), replace(changes, edits=(), places={}), data))


def split(message: bytes) -> tuple[Surroundings, Changes, bytes]:
    """Split the result of ``dumps``: the last part is the argument of ``loads``.

    The rank adopts the caller's surroundings first, because ``loads`` imports modules.
    """
    parts: tuple[Surroundings, Changes, bytes] = pickle.loads(message)
    return parts


def loads(data: bytes) -> tuple[Callable[..., Any], Any, Sequence[Edit]]:
    """The function, its argument, and the edits of the imported modules of the user."""
    (function, argument), edits = _Unpickler(BytesIO(data)).load()
    return function, argument, edits


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, path: Any) -> object:
        return module_contents.resolve(path)


@dataclass(frozen=True)
class _Found:
    """What a pickle refers to.

    ``modules``: names of modules that the rank may import. ``codes``: of functions that are pickled
    by value. ``objects``: all else that may also be found in a module.
    """

    modules: set[str] = field(default_factory=set)
    codes: set[CodeType] = field(default_factory=set)
    objects: list[object] = field(default_factory=list)

    def add(self, value: object) -> None:
        kind = type(value)
        if kind in CONSTANTS or kind is torch.device:
            return
        if kind is FunctionType and is_pickled_by_value(value):
            self.codes.add(value.__code__)  # type: ignore[attr-defined]  # it is a function
            return
        with suppress(Exception):  # a property of the user may raise anything
            named: Any = value
            name = named.__name__ if isinstance(value, ModuleType) else named.__module__
            if isinstance(name, str):
                self.modules.add(name)
        if not isinstance(value, NAMED):
            self.objects.append(value)


def _pickle_with_edits(work: object, changes: Changes, found: _Found) -> bytes:
    """Pickle the work and the edits of modules. Raises BadCase that names an edit."""
    try:
        return _cloudpickle(work, changes, found)
    except Exception:
        without = replace(changes, edits=())
        _cloudpickle(work, without, found)  # raises if it is not for an edit
        for path, _, values in changes.edits:
            for step, value in values.items():
                try:
                    _cloudpickle(value, without, _Found())
                except Exception as error:
                    right = (
                        "a value that can be pickled, since the module is not like this in a new "
                        f"import; the ranks import {path[0]}, and cannot be sent this: {error}"
                    )
                    raise BadCase("step", module_contents.text((*path, step)), right) from error
        raise


def _cloudpickle(work: object, changes: Changes, found: _Found) -> bytes:
    modules = modules_pickled_by_value()
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = BytesIO()
        _CloudPickler(file, changes, found).dump((work, changes.edits))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


class _CloudPickler(CloudPicklerWithFiles):
    """What a rank's import of a module has too is pickled as its path, and even a module of a
    special class, such as ``torch.backends.cudnn``, as its name.
    """

    def __init__(self, file: BytesIO, changes: Changes, found: _Found) -> None:
        super().__init__(file)
        self._places = changes.places
        self._found = found

    def persistent_id(self, value: object) -> Any:
        if type(value) in CONSTANTS:
            return None
        self._found.add(value)
        if isinstance(value, NAMED):
            return None
        return self._places.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            names = [name for name, module in list(sys.modules.items()) if module is value]
            if names:
                return import_module, (names[0],)
        return super().reducer_override(value)


# Lets a rank exchange objects of the classes and functions in a user's file with its workers, and
# with other ranks by collectives of objects, such as all_gather_object.
#
# Plain pickle sends the name of a class or function. In a training script the worker finds it
# under this name. On a rank it was perhaps pickled by value, because it is part of a test file or
# of a file given on the command line, and no process can import it there. Such a class or
# function is pickled by value for the workers too. One that is defined inside a function is not,
# because pickle refuses it in a training script as well.

_forking_pickler: Any = ForkingPickler
"""Pickle calls its method ``reducer_override``, which the class does not define, if it has one."""

_of_collectives: Any = torch.distributed.distributed_c10d
"""It pickles objects with its ``_pickler``, which is private in torch."""


class _ObjectPickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        return _reduce(self, value)


def pickle_by_value_for_workers() -> None:
    """From now on, let multiprocessing and torch's collectives of objects pickle by value what no
    process can import.
    """
    _forking_pickler.reducer_override = _reduce
    _of_collectives._pickler = _ObjectPickler


@contextmanager
def pickled_by_value_for_workers() -> Iterator[None]:
    """The same inside the block only, for a process that is a rank for a while."""
    before, pickler = ForkingPickler.__dict__.get("reducer_override"), _of_collectives._pickler
    pickle_by_value_for_workers()
    try:
        yield
    finally:
        del _forking_pickler.reducer_override
        _of_collectives._pickler = pickler
        if before is not None:
            _forking_pickler.reducer_override = before


def _reduce(pickler: pickle.Pickler, value: object) -> Any:
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
