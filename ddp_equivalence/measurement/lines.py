"""Follows the lines of the user's code while a step runs, and what their local names hold."""

from __future__ import annotations

import dis
import inspect
import linecache
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.measurement.calls import CodeLine, is_users, line_at

# Nothing of torch is replaced for this, so functions that the user has imported by name are seen
# too. Source: docs.python.org/3/library/sys.html, ``sys.settrace``.

MOST_LINES = 20_000
"""So many lines are remembered."""

MOST_RETURNED = 8
"""So many scalars are remembered with the line that returned them."""

Handler = Callable[[FrameType], object]
"""Gets the frame of a function that begins."""

AfterLine = Callable[[CodeLine, bool], object]
"""Gets a line that has run, and whether it may have changed tensors without a new version."""

Values = Callable[[FrameType, CodeLine | None, object], object]
"""Gets a frame, its line that has run, or None where it begins, and what it returns, if it does."""

WITHOUT_VERSION = (".data", "numpy", "set_(", "memory")
"""Lines with these words may change a tensor in ways that its version does not count."""


class LineTracer:
    """``handlers``: the code of a function -> what to do when it is called.

    ``after_line`` is called after each line of the user's code, except in functions that are called
    while ``paused`` is true. ``values`` is called then too, but only once the next line of the same
    function begins, or the function returns; and where a function begins. ``on_event`` is told of
    every "call", "line" and "return" in the user's code, with what is returned.
    """

    def __init__(
        self, handlers: Mapping[CodeType, Handler], after_line: AfterLine, values: Values
    ) -> None:
        self._handlers = handlers
        self._after_line = after_line
        self._values = values
        self._number_in: dict[int, int] = {}  # id of a frame -> its line that runs
        self._line: CodeLine | None = None
        self._last_run: dict[tuple[CodeType, int], int] = {}
        self._times: dict[tuple[CodeType, int], int] = {}
        self._returned: list[tuple[weakref.ref[Tensor], CodeLine]] = []
        self._lines = 0
        self.paused = False
        self.on_event: Callable[[FrameType, str, object], object] = _nothing

    @property
    def lines_run(self) -> dict[CodeLine, int]:
        """Each line of the user's code that has run -> how many lines had run when it last began.

        They are in the order in which they ran first.
        """
        return {
            CodeLine(code.co_filename, number, code.co_name): last
            for (code, number), last in self._last_run.items()
        }

    @property
    def times_run(self) -> dict[CodeLine, int]:
        """Each line of the user's code that has run -> how often it began."""
        return {
            CodeLine(code.co_filename, number, code.co_name): times
            for (code, number), times in self._times.items()
        }

    def line_that_made(self, tensor: Tensor, frame: FrameType | None) -> CodeLine | None:
        """The line that gave a variable of a caller this tensor, or that returned it; None if
        neither is known. ``frame``: the innermost caller.
        """
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                names = {name for name, value in frame.f_locals.items() if value is tensor}
                line = self._last_line_that_sets(frame.f_code, names)
                if line is not None:
                    return line
            frame = frame.f_back
        for known, returned_at in reversed(self._returned):
            if known() is tensor:
                return returned_at
        return None

    def _last_line_that_sets(self, code: CodeType, names: set[str]) -> CodeLine | None:
        numbers: list[int] = []
        number = 0
        for instruction in dis.get_instructions(code) if names else ():
            number = instruction.positions.lineno or number if instruction.positions else number
            about = instruction.argval
            about = about if isinstance(about, tuple) else (about,)  # two variables at once
            if instruction.opname.startswith("STORE_") and names.intersection(about):
                numbers.append(number)
        ran = [one for one in numbers if (code, one) in self._last_run]
        if not ran:
            return None
        last = max(ran, key=lambda one: self._last_run[code, one])
        return CodeLine(code.co_filename, last, code.co_name)

    @contextmanager
    def tracing(self, running: FrameType | None = None) -> Iterator[None]:
        """Trace this thread inside the block, unless somebody else does already.

        ``running``: the innermost of the functions that run already, and are to be followed too,
        from the line on that each of them is at.
        """
        if sys.gettrace() is not None:
            yield
            return
        sys.settrace(self._on_call)
        followed = []
        while running is not None:
            if is_users(running.f_code.co_filename):
                running.f_trace = self._on_line
                self._number_in[id(running)] = running.f_lineno  # the rest of this line runs now
                self._note_run(running)
                followed.append(running)
            running = running.f_back
        try:
            yield
        finally:
            sys.settrace(None)
            for frame in followed:
                frame.f_trace = None
            self._finish_line()

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        handler = self._handlers.get(code)
        if handler is not None:
            self._finish_line()
            without_failing(handler, frame)
            return None
        if not is_users(code.co_filename):
            return None
        self._finish_line()
        without_failing(self.on_event, frame, event, None)
        if not self.paused:
            without_failing(self._values, frame, None, None)
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            without_failing(self.on_event, frame, event, argument)
            self._look_into(frame, event == "return", argument)
        if event == "line":
            self._note_run(frame)
            if self.paused:
                return self._on_line
            self._finish_line()
            self._line = line_at(frame)
        elif event == "return":
            self._note_returned(frame, argument)
            if self.paused:
                return self._on_line
            self._finish_line()
            self._line = line_of_caller(frame)
        return self._on_line

    def _look_into(self, frame: FrameType, returns: bool, returned: Any) -> None:
        number = self._number_in.pop(id(frame), None)
        code = frame.f_code
        if not returns:
            self._number_in[id(frame)] = frame.f_lineno
        if number is not None and not self.paused:
            line = CodeLine(code.co_filename, number, code.co_name)
            without_failing(self._values, frame, line, returned)

    def _note_run(self, frame: FrameType) -> None:
        key = frame.f_code, frame.f_lineno
        self._lines += 1
        if len(self._last_run) < MOST_LINES:
            self._last_run[key] = self._lines
            self._times[key] = self._times.get(key, 0) + 1

    def _note_returned(self, frame: FrameType, value: object) -> None:
        if isinstance(value, Tensor) and value.ndim == 0 and value.requires_grad:
            code = frame.f_code
            line = CodeLine(code.co_filename, frame.f_lineno, code.co_name)
            self._returned[:] = [*self._returned[1 - MOST_RETURNED :], (weakref.ref(value), line)]

    def _finish_line(self) -> None:
        if self._line is not None and not self.paused:
            line = self._line
            without_failing(self._after_line, line, may_hide(line.file, line.number))


def _nothing(*arguments: object) -> None:
    """Nobody wants to know."""


def merged_handlers(*several: Mapping[CodeType, Handler]) -> dict[CodeType, Handler]:
    """All handlers; a function that has several calls each of them."""
    by_code: dict[CodeType, list[Handler]] = {}
    for handlers in several:
        for code, handler in handlers.items():
            by_code.setdefault(code, []).append(handler)
    return {code: partial(_call_each, handlers) for code, handlers in by_code.items()}


def _call_each(handlers: Sequence[Handler], frame: FrameType) -> None:
    for handler in handlers:
        handler(frame)


def code_of(function: Any) -> CodeType:
    """The code of a function, without what is wrapped around it."""
    code: CodeType = inspect.unwrap(function).__code__
    return code


def line_of_caller(frame: FrameType) -> CodeLine | None:
    """The innermost line of the user's that called this frame."""
    caller = frame.f_back
    while caller is not None and not is_users(caller.f_code.co_filename):
        caller = caller.f_back
    if caller is None:
        return None
    return line_at(caller)


@lru_cache(maxsize=4096)
def may_hide(file: str, number: int) -> bool:
    """True for a line that may change a tensor in ways that its version does not count."""
    line = linecache.getline(file, number)
    return any(word in line for word in WITHOUT_VERSION)


def without_failing(function: Callable[..., object], *arguments: Any) -> object:
    """Call the function. What it raises must not reach the user's step."""
    try:
        with torch._C.DisableTorchFunction():  # what the suite computes is not the user's
            return function(*arguments)
    except Exception:
        return None


# Remembers which line of the user's code first held each tensor.

MOST_ENTRIES_NAMED = 64
"""Of a longer list or dict, only so many entries are looked at."""

CONTAINERS = frozenset({dict, list, tuple})


class TensorOrigins:
    """A line held a tensor first if it bound it to a name, put it into a dict or list that has a
    name, or returned it. No tensor is kept alive.
    """

    def __init__(self) -> None:
        self._lines: dict[int, tuple[weakref.ref[Tensor], CodeLine | None]] = {}
        self._sizes: dict[int, dict[str, tuple[int, int]]] = {}
        """id of a frame -> name -> id and length of the container that was last looked into."""

    def after(self, frame: FrameType, line: CodeLine | None, returned: object) -> None:
        """This line of the frame has run. This is called after every line, so it must be quick.

        ``line``: None where the frame begins, since no line of it has made its arguments.
        ``returned``: what the frame returns, if it does.
        """
        if line is None:
            self._sizes[id(frame)] = {}
        sizes = self._sizes.setdefault(id(frame), {})
        for name, value in frame.f_locals.items():
            kind = type(value)
            if kind is Tensor:
                self._hold(value, line)
            elif kind in CONTAINERS:
                size = id(value), len(value)
                if sizes.get(name) != size:
                    sizes[name] = size
                    self._hold_all(_entries(value), line)
        if returned is not None:
            self._hold_all(_entries(returned), line)

    def line_of(self, tensor: Tensor) -> CodeLine | None:
        """The line that first held the tensor; None if no line did."""
        known = self._lines.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _hold_all(self, values: Iterable[object], line: CodeLine | None) -> None:
        for value in values:
            if type(value) is Tensor:
                self._hold(value, line)

    def _hold(self, tensor: Tensor, line: CodeLine | None) -> None:
        known = self._lines.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._lines[id(tensor)] = weakref.ref(tensor), line


def _entries(value: Any) -> Iterable[object]:
    """The first entries of a dict, list or tuple; of anything else, only itself."""
    if type(value) is dict:
        return list(value.values())[:MOST_ENTRIES_NAMED]
    return value[:MOST_ENTRIES_NAMED] if type(value) in CONTAINERS else (value,)
