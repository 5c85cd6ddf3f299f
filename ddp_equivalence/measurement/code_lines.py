"""Finds the lines of code that called a function, outside torch and this package."""

from __future__ import annotations

import functools
import os
from functools import lru_cache
from types import CodeType, FrameType

import torch

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.ranks.importable import belongs_to_user

_TORCH = os.path.join(os.path.dirname(os.path.realpath(torch.__file__)), "")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """True for a file of the user's own code."""
    return not file.startswith("<") and belongs_to_user(file)


@lru_cache(maxsize=4096)
def is_shown(file: str) -> bool:
    """True for a file that is part neither of torch nor of this package nor of Python."""
    if is_users(file):
        return True
    path = os.path.realpath(file)
    in_package = "site-packages" in path or "dist-packages" in path
    return in_package and not path.startswith((_TORCH, _PACKAGE)) and not file.startswith("<")


def line_at(frame: FrameType) -> CodeLine:
    """The line at which a frame is."""
    code = frame.f_code
    return CodeLine(code.co_filename, frame.f_lineno, code.co_name)


def lines_of(frame: FrameType | None) -> tuple[CodeLine | None, CodeLine | None]:
    """The innermost line outside torch and this package, and the innermost one of the user's."""
    innermost: CodeLine | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_shown(file):
            line = CodeLine(file, frame.f_lineno, frame.f_code.co_name)
            innermost = innermost or line
            if is_users(file):
                return innermost, line
        frame = frame.f_back
    return innermost, None


MOST_CALLERS = 8
"""So many lines that led to a call are kept."""


def callers_of(frame: FrameType | None) -> tuple[CodeLine, ...]:
    """The user's lines that led to a call, the innermost first, without the one that made it."""
    found: list[CodeLine] = []
    while frame is not None and len(found) <= MOST_CALLERS:
        code = frame.f_code
        if is_users(code.co_filename):
            found.append(CodeLine(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found[1:])


def callers_behind(line: CodeLine, frame: FrameType | None) -> tuple[CodeLine, ...]:
    """The user's lines that led to the function of a line that runs, or has just run in it."""
    while frame is not None:
        code = frame.f_code
        if (code.co_filename, code.co_name) == (line.file, line.function):
            return callers_of(frame)
        frame = frame.f_back
    return ()


def line_that_named(module: object, frame: FrameType | None) -> CodeLine | None:
    """The user's line that named a module which is called now.

    A function that was given the module as an argument did not choose it; its caller did.
    """
    line: CodeLine | None = None
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            line = CodeLine(code.co_filename, frame.f_lineno, code.co_name)
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if not any(frame.f_locals.get(name) is module for name in arguments):
                return line
        frame = frame.f_back
    return line


def users_code_of(function: object) -> CodeType | None:
    """The code that runs when a function, a partial or an object is called; None if it is not the
    user's.
    """
    while isinstance(function, functools.partial):
        function = function.func
    call = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None) or getattr(call, "__code__", None)
    return code if isinstance(code, CodeType) and is_users(code.co_filename) else None


def beginning_of(function: object) -> CodeLine | None:
    """The first line of a function of the user's; None if it is somebody else's."""
    code = users_code_of(function)
    if code is None:
        return None
    return CodeLine(code.co_filename, code.co_firstlineno, code.co_name)
