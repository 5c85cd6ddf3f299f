"""Lets functions of the user's file run on a rank as if something in it were written otherwise.

Nothing is written to the file. A trial on a rank replaces the code of the functions that exist.
"""

from __future__ import annotations
import __future__

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

FUTURE_FLAGS = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag,
    __future__.all_feature_names,
    0,
)


class CannotEdit(Exception):
    """The code cannot be replaced while its functions exist."""


@dataclass(frozen=True)
class EditedCode:
    """One statement at the top of a file, before and after an edit.

    ``file``: as the code objects name it. ``first_line``: the line at which the statement begins.
    ``before``, ``after``: the statement's source.
    """

    file: str
    first_line: int
    before: str
    after: str


@contextmanager
def run_as_edited(edited: EditedCode, roots: Iterable[object]) -> Iterator[None]:
    """Inside the block, functions of the user's file run as edited.

    ``roots``: functions of the user, such as the step, that may have been sent by value and belong
    to no module. Raises CannotEdit if no function is changed by the edit, or if one that exists
    cannot take other code.
    """
    functions = functions_of(edited.file, roots)
    flags = functions[0].__code__.co_flags & FUTURE_FLAGS if functions else 0
    before, after = (_codes(edited, text, flags) for text in (edited.before, edited.after))
    changed = {
        key: after[key] for key, code in before.items() if key in after and code != after[key]
    }
    originals: list[tuple[FunctionType, CodeType]] = []
    places = {(code.co_qualname, code.co_firstlineno): key for key, code in before.items()}
    try:
        for function in functions:
            code = function.__code__
            key = places.get((code.co_qualname, code.co_firstlineno))
            if key in changed:
                try:
                    function.__code__ = changed[key]
                except ValueError as error:  # the edited code needs other variables of its closure
                    raise CannotEdit(str(error)) from error
                originals.append((function, code))
        if not originals:
            raise CannotEdit("no function that exists has this code")
        yield
    finally:
        for function, code in originals:
            function.__code__ = code


def functions_of(file: str, roots: Iterable[object]) -> list[FunctionType]:
    """All functions of this file that the modules of this process, or these objects, lead to.

    They are found through the variables of modules and closures, classes, decorators and partials.
    """
    found: list[FunctionType] = []
    seen: set[int] = set()
    waiting: list[object] = [*roots]
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and getattr(module, "__file__", None) == file:
            waiting += vars(module).values()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType) and one.__code__.co_filename == file:
            found.append(one)
            waiting += one.__globals__.values()
        waiting += _led_to(one, file)
    return found


def _led_to(one: object, file: str) -> list[object]:
    """What to look at next: functions and classes lead on, and objects of the user's classes."""
    if isinstance(one, FunctionType):
        cells = [cell for cell in one.__closure__ or () if _is_filled(cell)]
        wrapped = getattr(one, "__wrapped__", None)
        return [wrapped, *(cell.cell_contents for cell in cells)]
    if isinstance(one, MethodType | staticmethod | classmethod):
        return [one.__func__]
    if isinstance(one, property):
        return [one.fget, one.fset, one.fdel]
    if isinstance(one, functools.partial | functools.cached_property):
        return [one.func]
    module = sys.modules.get(getattr(one, "__module__", None) or "")
    if isinstance(one, type):
        is_users = getattr(module, "__file__", None) == file or module is None
        return list(vars(one).values()) if is_users or one.__module__ == "__main__" else []
    if isinstance(one, ModuleType) or module is None:
        return []
    return [type(one)] if getattr(module, "__file__", None) == file else []


def _is_filled(cell: Any) -> bool:
    try:
        return bool(cell.cell_contents is not None)
    except ValueError:  # the variable has no value yet
        return False


def _codes(edited: EditedCode, text: str, flags: int) -> dict[tuple[str, int], CodeType]:
    """The code of every function in the statement, by its name and its number among equal names."""
    padding = "\n" * (edited.first_line - 1)
    module = compile(padding + text, edited.file, "exec", flags=flags, dont_inherit=True)
    found: dict[tuple[str, int], CodeType] = {}
    waiting = [module]
    while waiting:
        code = waiting.pop(0)
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
        if code is not module:
            number = sum(name == code.co_qualname for name, _ in found)
            found[code.co_qualname, number] = code
    return found
