"""Pickles functions for the ranks, lambdas and closures too, whatever pytest's import mode is."""

from __future__ import annotations

import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any, NoReturn

import cloudpickle
import torch

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.ranks import module_contents
from ddp_equivalence.ranks.importable import is_pickled_by_value, modules_pickled_by_value
from ddp_equivalence.ranks.module_contents import CONSTANTS, Edit
from ddp_equivalence.ranks.process_state import environment_variables, read_training_settings
from ddp_equivalence.ranks.user_modules import NO_CHANGES, Changes, changes_in

# Tells within microseconds whether a function has changed since it was last pickled.
#
# Pickling a function by value takes milliseconds, so the result is kept and used again. A
# fingerprint covers everything that cloudpickle would send: code, defaults, closure, the globals
# that the code names, and whatever those refer to in turn. A list, a dict or any other object
# that can change in place cannot have a fingerprint. A function that refers to one is pickled
# anew each time.

CONSTANT_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device),
)

PICKLED_BY_NAME = (
    FunctionType,
    type,
    ModuleType,
    BuiltinFunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
)
"""Objects of these types are pickled as a name, so two of them are equal only if identical."""

Fingerprint = tuple[Hashable, ...]


class NoFingerprint(Exception):
    """The value refers to an object that can change unnoticed; the message names its type."""


def fingerprint(
    value: object, by_value: Callable[[Any], bool]
) -> tuple[Fingerprint, tuple[object, ...]]:
    """A fingerprint, and the objects that the caller must keep alive as long as it is used.

    The objects are identified by ``id()``, which Python reuses once an object is freed.
    ``by_value`` is asked about each function, class and module, and returns True if it is pickled
    by value. Raises NoFingerprint.
    """
    identified: list[object] = []
    return tuple(_parts(value, by_value, identified, {})), tuple(identified)


def _parts(
    value: Any, by_value: Callable[[Any], bool], identified: list[object], seen: dict[int, int]
) -> Iterator[Hashable]:
    """Yield the parts of the fingerprint; ``seen`` numbers the functions and classes visited."""
    yield type(value).__name__
    if isinstance(value, CONSTANT_TYPES):
        yield repr(value) if isinstance(value, float | complex) else value
        return
    inner: Iterable[object]
    if isinstance(value, ModuleType) and by_value(value):
        raise NoFingerprint("module")  # it is pickled with everything in it
    if isinstance(value, CodeType):
        yield value
        yield value.co_filename  # code objects compare equal without it
        inner = ()
    elif isinstance(value, FunctionType | type) and by_value(value):
        if id(value) in seen:
            yield seen[id(value)]  # a recursive reference
            return
        seen[id(value)] = len(seen)
        inner = _of_function(value) if isinstance(value, FunctionType) else _of_class(value)
    elif isinstance(value, PICKLED_BY_NAME):
        identified.append(value)
        yield id(value)
        inner = ()
    elif isinstance(value, tuple):
        inner = (len(value), *value)
    elif isinstance(value, staticmethod | classmethod):
        inner = (value.__func__,)
    elif isinstance(value, property):
        inner = value.fget, value.fset, value.fdel
    elif isinstance(value, partial):
        inner = value.func, value.args, tuple(value.keywords.items())
    else:
        raise NoFingerprint(type(value).__name__)
    for part in inner:
        yield from _parts(part, by_value, identified, seen)


def _of_function(function: FunctionType) -> Iterator[object]:
    yield function.__code__
    yield function.__defaults__
    yield tuple((function.__kwdefaults__ or {}).items())
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value yet
            yield "empty"
    yield tuple(sorted(vars(function).items()))
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name
            yield function.__globals__[name]


def _of_class(cls: type) -> Iterator[object]:
    yield cls.__bases__
    for name, value in vars(cls).items():
        if name not in ("__dict__", "__weakref__", "__doc__", "__annotations__"):
            yield name
            yield value


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


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
        return super().reducer_override(value)


def dumps_with_files(value: object) -> bytes:
    """What ``cloudpickle.loads`` makes the object of."""
    file = BytesIO()
    CloudPicklerWithFiles(file).dump(value)
    return file.getvalue()


def _code_in_file(make: Callable[..., CodeType], arguments: Any, file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


# Pickles functions for the ranks, lambdas and closures too, whatever pytest's import mode is.
#
# A function of an importable module is pickled as its name. A function that the ranks cannot
# import under its name is pickled by value, with cloudpickle. Examples are a function of a test
# module under ``--import-mode=importlib``, and one of a file given on the command line.

MAX_CACHED = 64
"""The number of pickles that are kept. The most recently used ones stay."""

MAX_EDITS = 64 * 2**20
"""Bytes of changed values in modules that are sent to the ranks."""

NAMED = (FunctionType, type, ModuleType)
"""Objects of these types are not looked up by their place in a module, since they have names."""

_cache: OrderedDict[Fingerprint, tuple[bytes, _Found, tuple[object, ...]]] = OrderedDict()
"""Fingerprint -> the pickle, what it refers to, and the objects to keep alive with it.

They are kept alive as long as the fingerprint is used.
"""


@dataclass(frozen=True)
class CallerState:
    """The state of the judging process that a pickled function may depend on.

    ``compared``: the user's modules whose changes are sent with the function. ``failed``: those of
    which nobody knows what has changed, and why. ``imports``: those to import before unpickling, in
    this order.
    """

    import_path: list[str]
    working_folder: str
    environment: dict[bytes, bytes]
    settings: dict[str, Any]
    compared: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    imports: Sequence[str] = ()


def dumps(function: Callable[..., Any], argument: object) -> bytes:
    """Pickle a function and its argument, together with the state of this process.

    Functions and classes that the ranks cannot import are pickled separately, by value. That pickle
    is used again unless something in them may have changed since. Raises BadCase if something has
    changed in an imported module that cannot be sent to the ranks.
    """
    caller = CallerState(
        list(sys.path), os.getcwd(), environment_variables(), read_training_settings()
    )
    work, found = (function, argument), _Found()
    changes = NO_CHANGES
    try:
        body = _pickle_body(work, changes, found)
        values = _dumps_by_value(tuple(body.by_value), found)
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
        body = _pickle_body(work, changes, found)
        values = _pickle_with_edits(tuple(body.by_value), changes, found)
        complete = known >= found.modules | found.codes
    caller = replace(
        caller, compared=changes.compared, failed=changes.failed, imports=changes.imports
    )
    return pickle.dumps((caller, values, body.data))


def split(message: bytes) -> tuple[CallerState, bytes, bytes]:
    """Split the result of ``dumps`` into the caller's state and the two arguments of ``loads``.

    The rank adopts the state first, because ``loads`` imports modules.
    """
    parts: tuple[CallerState, bytes, bytes] = pickle.loads(message)
    return parts


def loads(by_value: bytes, body: bytes) -> tuple[Callable[..., Any], Any, list[Edit]]:
    """The function, its argument, and the edits of the imported modules of the user."""
    values, edits = _Unpickler(BytesIO(by_value), ()).load()
    function, argument = _Unpickler(BytesIO(body), values).load()
    return function, argument, edits


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
        if kind in CONSTANT_TYPES:
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


@dataclass(frozen=True)
class _Body:
    data: bytes
    by_value: list[object]


def _pickle_body(work: object, changes: Changes, found: _Found) -> _Body:
    file = BytesIO()
    pickler = _Pickler(file, changes, found)
    pickler.dump(work)
    return _Body(file.getvalue(), pickler.by_value)


class _Pickler(pickle.Pickler):
    """Collects in ``by_value`` what must be pickled by value, and pickles its index instead.

    What a rank's import of a module has too is pickled as its path. What an edit puts into a module
    is collected too, since it must be the same object for the step.
    """

    def __init__(self, file: BytesIO, changes: Changes, found: _Found) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.by_value: list[object] = []
        self._places, self._sent = changes.places, changes.sent
        self._found = found

    def persistent_id(self, value: object) -> Any:
        if type(value) in CONSTANTS:
            return None
        if not isinstance(value, NAMED) and id(value) not in self._sent:
            self._found.add(value)
            return self._places.get(id(value))
        if isinstance(value, NAMED) and not is_pickled_by_value(value):
            self._found.add(value)
            return None
        for index, collected in enumerate(self.by_value):
            if collected is value:
                return index
        self.by_value.append(value)
        return len(self.by_value) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, by_value: tuple[object, ...]) -> None:
        super().__init__(file)
        self._by_value = by_value

    def persistent_load(self, key: Any) -> object:
        if isinstance(key, int):
            return self._by_value[key]
        return module_contents.resolve(key)


def _dumps_by_value(values: tuple[object, ...], found: _Found) -> bytes:
    """Pickle these objects by value, or return the last pickle if they have not changed."""
    if not values:
        return _NO_VALUES
    try:
        key, identified = fingerprint(values, is_pickled_by_value)
    except NoFingerprint:
        return _cloudpickle(values, NO_CHANGES, found)
    if key not in _cache:
        new = _Found()
        _cache[key] = _cloudpickle(values, NO_CHANGES, new), new, identified
        while len(_cache) > MAX_CACHED:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    data, known, _ = _cache[key]
    found.modules.update(known.modules)
    found.codes.update(known.codes)
    found.objects.extend(known.objects)
    return data


_NO_VALUES = pickle.dumps(((), []))


def _pickle_with_edits(values: tuple[object, ...], changes: Changes, found: _Found) -> bytes:
    """Pickle these objects by value, with the edits of modules. Raises BadCase, with a name."""
    try:
        data = _cloudpickle(values, changes, found)
    except Exception:
        _cloudpickle(values, replace(changes, edits=()), found)  # raises if it is not for an edit
        _raise_for_worst_edit(changes)
    if changes.edits and len(data) > MAX_EDITS:
        without = _cloudpickle(values, replace(changes, edits=()), found)
        if len(data) - len(without) > MAX_EDITS:
            _raise_for_worst_edit(changes)
    return data


def _raise_for_worst_edit(changes: Changes) -> NoReturn:
    """Raise BadCase for the first edit that cannot be pickled, or else for the largest."""
    without = replace(changes, edits=())
    sizes = {}
    for edit in changes.edits:
        name = module_contents.text((*edit.path, edit.step))
        try:
            sizes[name] = len(_cloudpickle((edit.value,), without, _Found()))
        except Exception as error:
            right = (
                f"a value that can be pickled, since the module is not like this in a new "
                f"import; the ranks import {edit.path[0]}, and cannot be sent this: {error}"
            )
            raise BadCase("step", name, right) from error
    worst = max(sizes, key=sizes.__getitem__)
    right = (
        f"at most {MAX_EDITS >> 20} MB of what differs from a new import of the module; "
        f"these are {sizes[worst] / 2**20:.0f} MB, so build them where they are needed"
    )
    raise BadCase("step", worst, right)


def _cloudpickle(values: tuple[object, ...], changes: Changes, found: _Found) -> bytes:
    modules = modules_pickled_by_value()
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = BytesIO()
        _CloudPickler(file, changes, found).dump((values, changes.edits))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


class _CloudPickler(CloudPicklerWithFiles):
    """Pickles even a module of a special class, such as ``torch.backends.cudnn``, as its name."""

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


# Lets a rank and its workers exchange objects of the classes and functions in a user's file.
#
# Plain pickle sends the name of a class or function. In a training script the worker finds it
# under this name. On a rank it was perhaps pickled by value, because it is part of a test file or
# of a file given on the command line, and no process can import it there. Such a class or
# function is pickled by value for the workers too. One that is defined inside a function is not,
# because pickle refuses it in a training script as well.

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
