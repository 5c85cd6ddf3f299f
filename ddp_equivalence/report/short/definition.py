"""Where the user's step is defined, and how a line of code is named in a report."""

from __future__ import annotations

import functools
import inspect
import linecache
import os

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.report.line import Link

LONGEST_PATH = 40
"""A longer path is shortened to the name of its file."""


def defined_at(step: object) -> CodeLine | None:
    """The line that defines the step; None for a name, and for what is not written in Python."""
    if isinstance(step, type):
        return _class_line(step)
    try:
        function = inspect.unwrap(step) if callable(step) else step
    except ValueError:  # the wrappers form a cycle
        return None
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__") and not inspect.ismethod(function):
        function = vars(type(function)).get("__call__", function)  # an object that can be called
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith("<"):
        return None
    return CodeLine(code.co_filename, _line_of_def(code.co_filename, code), code.co_name)


def _class_line(step: type) -> CodeLine | None:
    """Where a class begins that is made for each rank; None if its source cannot be found."""
    try:
        file, number = inspect.getsourcefile(step), inspect.findsource(step)[1] + 1
    except (OSError, TypeError):
        return None
    return None if file is None else CodeLine(file, number, step.__name__)


def _line_of_def(file: str, code: object) -> int:
    """Python counts a function from its first decorator; a reader looks for ``def``."""
    first: int = getattr(code, "co_firstlineno", 1)
    name = f"def {getattr(code, 'co_name', '')}("
    for number, text in enumerate(linecache.getlines(file)[first - 1 : first + 20], start=first):
        if name in text:
            return number
    return first


def place_name(line: CodeLine) -> str:
    """``folder/file.py:12``, from the working folder if the file lies below it."""
    path = os.path.abspath(line.file)
    try:
        path = os.path.relpath(path)
    except ValueError:  # on another drive
        path = os.path.basename(path)
    if path.startswith(os.pardir) or len(path) > LONGEST_PATH:
        path = os.path.basename(path)
    return f"{path}:{line.number}"


def link_to(line: CodeLine) -> Link:
    """The name of the line, with what a terminal needs to open it."""
    return Link(place_name(line), line.file, line.number)


def source_of(line: CodeLine) -> str:
    """The text of the line; "" if the file cannot be read."""
    return linecache.getline(line.file, line.number).strip()
