"""Who is told of every verdict, and which verdicts somebody has read."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict


# Functions that are called with every verdict that ``check`` or ``observe`` reaches.

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict

    Listener = Callable[[Verdict, Request | None], None]
    """Gets the verdict, and the request that it answers; None for a step of an observed script."""

_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with every verdict that is reached inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(verdict: Verdict, request: Request | None) -> None:
    """Pass a verdict on to all listeners."""
    for listener in _listeners:
        listener(verdict, request)


# Which verdicts have been read since ``check`` returned them.
#
# The pytest plugin asks, because a test that reads nothing of a verdict passes whatever it is.

OF_A_VERDICT = "_reading"
"""The attribute of a verdict that holds its Reading. It is no field: two verdicts that say the same
are equal, whoever has read them."""


@dataclass
class Reading:
    """What a message says of one check, and whether anybody has read its verdict.

    ``file`` and ``line``: where ``check`` was called. ``done``: something that the check found out
    was read from the verdict, or from a copy of it.
    """

    subject: str
    outcome: str
    file: str
    line: int
    done: bool = False


@dataclass(frozen=True)
class Returned:
    """A verdict that ``check`` has returned.

    ``verdict`` is a weak reference, and ``reading`` holds none, so that a verdict which nobody
    keeps is freed and one that is kept can be pickled.
    """

    verdict: weakref.ref[Verdict]
    reading: Reading

    @property
    def can_be_read(self) -> bool:
        """False if nobody has kept the verdict."""
        return self.verdict() is not None


_watched: list[list[Returned]] = []
"""The lists of all ``watched`` blocks that are running, the innermost last."""


@contextmanager
def watched() -> Iterator[list[Returned]]:
    """Collect the verdicts that ``check`` returns in the block, but not in a block inside it."""
    returned: list[Returned] = []
    _watched.append(returned)
    try:
        yield returned
    finally:
        _watched.remove(returned)


def begin(verdict: Verdict) -> None:
    """Note from now on whether the verdict is read. ``check`` calls this last."""
    if not _watched:
        return
    reading = Reading(verdict.subject, verdict.outcome, *_caller())
    _watched[-1].append(Returned(weakref.ref(verdict), reading))
    object.__setattr__(verdict, OF_A_VERDICT, reading)


def _caller() -> tuple[str, int]:
    """File and line of the nearest caller that is not in this package."""
    frame = sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
