"""Lets functions of the user's file run on a rank as if something in it were written otherwise."""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ddp_equivalence.measurement.calls import is_users

# Nothing is written to the file. A trial on a rank replaces the code of the functions that exist.

FUTURE_FLAGS = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag,
    __future__.all_feature_names,
    0,
)


OF_PYTEST = "@pytest_ar"
"""The name by which an assert that pytest has rewritten finds the module that explains it."""

HOW_TO_CALL = {"CACHE", "CALL", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL"}
"""Instructions that may differ although the source is the same."""

MOST_ELEMENTS = 1000
"""Functions are not looked for in a list or a dictionary of the user's with more elements."""

MOST_OBJECTS = 50_000
"""So many objects of a user's are looked at, the nearest first: every edit looks at them anew."""

PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None), Tensor, nn.Parameter})
"""Types of objects that lead to no function."""

WRAPPERS = (
    *(MethodType, staticmethod, classmethod, property),
    *(functools.partial, functools.cached_property, type(functools.cache(len))),
)
WRAPPED = (
    *("__func__", "__self__", "fget", "fset", "fdel"),
    *("func", "args", "keywords", "__wrapped__"),
)
"""Types of objects that call a function, and their attributes that lead to it."""


class CannotEdit(Exception):
    """The code cannot be replaced while its functions exist."""


@dataclass(frozen=True)
class EditedCode:
    """Statements at the top of a file, ``before`` and ``after`` an edit.

    ``file``: as the code objects name it. ``line``: the one that is edited.
    """

    file: str
    before: ast.Module
    after: ast.Module
    line: int = 0


@contextmanager
def run_as_edited(edited: EditedCode, roots: Iterable[object]) -> Iterator[None]:
    """Inside the block, functions of the user's file run as edited.

    ``roots``: functions of the user, such as the step, that may have been sent by value and belong
    to no module. Raises CannotEdit if no function is changed by the edit, or if one that exists
    cannot take other code.
    """
    functions = functions_of(edited.file, roots)
    flags = functions[0].__code__.co_flags & FUTURE_FLAGS if functions else 0
    codes = _codes_before_and_after(edited, flags)
    originals: list[tuple[FunctionType, CodeType]] = []
    try:
        for function in functions:
            code = function.__code__
            other = _code_after(code, codes)
            if other is None:
                continue
            # Python itself compares only the number of variables, and would mix them up.
            if other.co_freevars != code.co_freevars:
                raise CannotEdit(f"{code.co_qualname} would need other variables of its closure")
            function.__code__ = other
            originals.append((function, code))
        if not originals:
            raise CannotEdit("no function that exists has this code")
        yield
    finally:
        for function, code in originals:
            function.__code__ = code


def functions_of(file: str, roots: Iterable[object]) -> list[FunctionType]:
    """All functions of this file that the modules of this process, or these objects, lead to.

    They are found through the variables of the user's modules and functions, and through classes,
    objects, containers, decorators and partials.
    """
    found: list[FunctionType] = []
    seen: dict[int, object] = {}  # with the objects, since a number is given again
    waiting: deque[object] = deque(roots)
    for module in list(sys.modules.values()):
        if type(module) is ModuleType and vars(module).get("__file__") == file:
            waiting += vars(module).values()
    while waiting and len(seen) < MOST_OBJECTS:
        one = waiting.popleft()
        if type(one) in PLAIN or id(one) in seen:
            continue
        seen[id(one)] = one
        if type(one) is FunctionType and one.__code__.co_filename == file:
            found.append(one)
        waiting += _led_to(one)
    return found


def _led_to(one: object) -> Iterable[object]:
    """The objects to look at next. Only types are compared: a user's object may answer anything."""
    if type(one) is FunctionType:
        names = one.__globals__.values() if is_users(one.__code__.co_filename) else ()
        return [*vars(one).values(), *(_content(cell) for cell in one.__closure__ or ()), *names]
    if type(one) in WRAPPERS:
        return [getattr(one, name, None) for name in WRAPPED]
    if type(one) is dict:
        return list(one.values()) if len(one) <= MOST_ELEMENTS else ()
    if type(one) is list or type(one) is tuple:
        return one if len(one) <= MOST_ELEMENTS else ()
    if issubclass(type(one), type):
        assert isinstance(one, type)
        return list(vars(one).values()) if _is_of_users(one) else ()
    if not _is_of_users(type(one)):
        return ()
    try:
        return [type(one), *object.__getattribute__(one, "__dict__").values()]
    except AttributeError:  # its class has slots
        return [type(one)]


def _is_of_users(one: type) -> bool:
    """True for a class of a user's file, and for one that was sent by value."""
    name = vars(one).get("__module__")
    if not isinstance(name, str):  # it is written in C
        return False
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_users(file)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _code_after(code: CodeType, codes: Sequence[tuple[CodeType, CodeType]]) -> CodeType | None:
    """The new code of a function; None if it stays. ``codes``: before and after the edit."""
    place = code.co_qualname, code.co_firstlineno
    there = [
        (before, after)
        for before, after in codes
        if (before.co_qualname, before.co_firstlineno) == place
    ]
    if not _is_rewritten(code):  # the file may have changed since its import
        there = [(before, after) for before, after in there if _read_alike(before, code)]
    if len(there) > 1:  # such as lambdas of one line, which begin at different columns
        there = [(before, after) for before, after in there if before == code]
    return next((after for before, after in there if before != after), None)


def _is_rewritten(code: CodeType) -> bool:
    """True if pytest has rewritten an assert of the function, so that no source has its code."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return OF_PYTEST in code.co_names or any(map(_is_rewritten, inner))


def _read_alike(one: object, other: object) -> bool:
    """True for code of the same source, compiled with the rest of its file or without it."""
    if not (isinstance(one, CodeType) and isinstance(other, CodeType)):
        return type(one) is type(other) and one == other
    pairs = zip_longest(_instructions(one), _instructions(other))
    return all(
        left is not None
        and right is not None
        and left[0] == right[0]
        and _read_alike(left[1], right[1])
        for left, right in pairs
    )


def _instructions(code: CodeType) -> Iterator[tuple[str, object]]:
    """The instructions of the code. How it calls a method depends on what its file imports."""
    for one in dis.get_instructions(code):
        if one.opname not in HOW_TO_CALL:
            is_jump = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
            name = "LOAD_ATTR" if one.opname == "LOAD_METHOD" else one.opname
            yield name, None if is_jump else one.argval


def _codes_before_and_after(edited: EditedCode, flags: int) -> list[tuple[CodeType, CodeType]]:
    """Every function of the statement with its code before and after the edit.

    Functions of equal names are told apart by their order. If the edit adds or removes one of
    them, nobody can say which is which.
    """
    before, after = (_codes(edited.file, one, flags) for one in (edited.before, edited.after))
    return [
        pair
        for name, codes in before.items()
        if len(codes) == len(after.get(name, ()))
        for pair in zip(codes, after[name], strict=True)
    ]


def _codes(file: str, tree: ast.Module, flags: int) -> dict[str, list[CodeType]]:
    """The code of every function in some statements, by its qualified name."""
    module = compile(tree, file, "exec", flags=flags, dont_inherit=True)
    found: dict[str, list[CodeType]] = {}
    waiting = [module]
    while waiting:
        code = waiting.pop(0)
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
        if code is not module:
            found.setdefault(code.co_qualname, []).append(code)
    return found


# Keeps an edited step from doing anything outside its process: it may write no file, for example.
#
# An edit may turn a harmless step into one that writes to a wrong file, so none of this is
# allowed. What is written by code in C that tells Python nothing is not noticed, except by
# ``torch.save``.

FORBIDDEN = frozenset(
    {
        *("ftplib.connect", "http.client.connect", "smtplib.connect", "sqlite3.connect"),
        *("os.chmod", "os.chown", "os.exec", "os.kill", "os.killpg", "os.link", "os.mkdir"),
        *("os.posix_spawn", "os.remove", "os.rename", "os.removexattr", "os.rmdir", "os.setxattr"),
        *("os.spawn", "os.symlink", "os.system", "os.truncate", "os.utime", "shutil.copyfile"),
        *("shutil.move", "shutil.rmtree", "subprocess.Popen", "urllib.Request"),
    }
)
"""Events of docs.python.org/3/library/audit_events.html that change something outside."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

SENDING = ("socket.connect", "socket.sendto", "socket.sendmsg")

LOOPBACK = ("127.0.0.1", "::1", "localhost")

OF_WORKERS = "pymp-"
"""The multiprocessing module begins the names of its temporary folders so. The workers of a
DataLoader have sockets there."""


class WouldActOutside(Exception):
    """The step would have changed something outside its process."""


@contextmanager
def kept_inside(other_threads: bool = True) -> Iterator[list[str]]:
    """Inside the block, whatever would act outside raises WouldActOutside.

    A module that is imported there for the first time is not written to __pycache__.

    Yields a list of what was prevented, since the user's own code may catch the exception.
    ``other_threads``: False lets threads that run already do what they like.
    """
    global _inside, _is_hooked
    if not _is_hooked:  # a hook cannot be removed again
        sys.addaudithook(_hook)
        _is_hooked = True
    tempfile.gettempdir()  # the first call in a process tries to write a file
    others = threading.enumerate() if not other_threads else []
    free = frozenset(one.ident for one in others) - {threading.get_ident()}
    _inside = _Inside(free)
    try:
        with (
            patch.object(torch._C, "PyTorchFileWriter", _noted_writer),
            patch.object(sys, "dont_write_bytecode", True),
        ):
            yield _inside.prevented
    finally:
        _inside = None


class _Inside:
    """``free_threads``: those that nothing is forbidden to. ``prevented``: what was tried."""

    def __init__(self, free_threads: frozenset[int | None]) -> None:
        self.free_threads = free_threads
        self.prevented: list[str] = []


_inside: _Inside | None = None
_is_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _inside is None or threading.get_ident() in _inside.free_threads:
        return
    if what := _acts_outside(event, arguments):
        _inside.prevented.append(what)
        raise WouldActOutside(what)


def _acts_outside(event: str, arguments: tuple[Any, ...]) -> str:
    """Says what would happen, in words; "" if it stays inside the process."""
    if event == "open":
        path, mode, flags = arguments
        writes = any(letter in "wax+" for letter in mode or "") or bool((flags or 0) & WRITING)
        is_file = not isinstance(path, int) and os.fsdecode(path) != os.devnull
        return f"open {os.fsdecode(path)!r} for writing" if writes and is_file else ""
    if event in SENDING:
        address = arguments[1]
        is_elsewhere = isinstance(address, tuple) and address[0] not in LOOPBACK
        return f"connect to {address}" if is_elsewhere else ""
    if event in ("os.kill", "os.killpg") and arguments[0] == os.getpid():
        return ""
    return event if event in FORBIDDEN and not _is_of_workers(arguments) else ""


def _is_of_workers(arguments: tuple[Any, ...]) -> bool:
    path = arguments[0] if arguments else None
    folder = os.path.join(tempfile.gettempdir(), OF_WORKERS)
    return isinstance(path, str) and path.startswith(folder)


_torch_writer: Any = torch._C.PyTorchFileWriter


def _noted_writer(file: object, *arguments: Any) -> Any:
    """Opens the file of a ``torch.save``, in C. Python is told, as if it opened the file itself."""
    if isinstance(file, str):
        sys.audit("open", file, "w", 0)
    return _torch_writer(file, *arguments)
