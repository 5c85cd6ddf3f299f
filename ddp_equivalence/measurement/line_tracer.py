"""Follows the lines of the user's code while a step runs, and the calls of chosen functions.

Nothing of torch is replaced for this, so functions that the user has imported by name are seen too.
Source: docs.python.org/3/library/sys.html, ``sys.settrace``.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.code_lines import is_users

Handler = Callable[[FrameType], object]
"""Gets the frame of a function that begins."""

AfterLine = Callable[[CodeLine, bool], object]
"""Gets a line that has run, and whether it may have changed tensors without a new version."""

InFrame = Callable[[CodeLine, FrameType, Any], bool]
"""Gets a line that has run, the frame that it ran in, and what the function returned there. Says
whether it found anything."""

MOST_IN_VAIN = 20
"""A line after which nothing was found so often is not looked at again, so that long loops stay
fast."""

WITHOUT_VERSION = (".data", "numpy", "set_(", "memory")
"""Lines with these words may change a tensor in ways that its version does not count."""


class LineTracer:
    """``handlers``: the code of a function -> what to do when it is called.

    ``after_line`` is called after each line of the user's code, except in functions that are called
    while ``paused`` is true. ``in_frame`` is called then too, but only once the next line of the
    same function begins, or the function returns.
    """

    def __init__(
        self, handlers: Mapping[CodeType, Handler], after_line: AfterLine, in_frame: InFrame
    ) -> None:
        self._handlers = handlers
        self._after_line = after_line
        self._in_frame = in_frame
        self._number_in: dict[int, int] = {}  # id of a frame -> its line that runs
        self._in_vain: dict[tuple[int, int], int] = {}  # id of a code, line -> how often
        self._line: CodeLine | None = None
        self.paused = False

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace this thread inside the block, unless somebody else does already."""
        if sys.gettrace() is not None:
            yield
            return
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(None)
            self._finish_line()

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        handler = self._handlers.get(code)
        if handler is not None:
            self._finish_line()
            _without_failing(handler, frame)
            return None
        if self.paused or not is_users(code.co_filename):
            return None
        self._finish_line()
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            self._look_into(frame, event == "return", argument)
        if event == "line":
            self._finish_line()
            code = frame.f_code
            self._line = CodeLine(code.co_filename, frame.f_lineno, code.co_name)
        elif event == "return":
            self._finish_line()
            self._line = _line_of_caller(frame)
        return self._on_line

    def _look_into(self, frame: FrameType, returns: bool, returned: Any) -> None:
        number = self._number_in.pop(id(frame), None)
        if not returns:
            self._number_in[id(frame)] = frame.f_lineno
        if number is None or self.paused:
            return
        code = frame.f_code
        key = id(code), number
        in_vain = self._in_vain.get(key, 0)
        if in_vain < MOST_IN_VAIN and code.co_name != "<module>":
            line = CodeLine(code.co_filename, number, code.co_name)
            found = _without_failing(self._in_frame, line, frame, returned)
            self._in_vain[key] = 0 if found else in_vain + 1

    def _finish_line(self) -> None:
        if self._line is not None and not self.paused:
            line = self._line
            _without_failing(self._after_line, line, _may_hide(line.file, line.number))


def code_of(function: Any) -> CodeType:
    """The code of a function, without what is wrapped around it."""
    code: CodeType = inspect.unwrap(function).__code__
    return code


def _line_of_caller(frame: FrameType) -> CodeLine | None:
    caller = frame.f_back
    while caller is not None and not is_users(caller.f_code.co_filename):
        caller = caller.f_back
    if caller is None:
        return None
    return CodeLine(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)


@lru_cache(maxsize=4096)
def _may_hide(file: str, number: int) -> bool:
    line = linecache.getline(file, number)
    return any(word in line for word in WITHOUT_VERSION)


def _without_failing(function: Callable[..., object], *arguments: Any) -> object:
    """Call the function. What it raises must not reach the user's step."""
    try:
        return function(*arguments)
    except Exception:
        return None
