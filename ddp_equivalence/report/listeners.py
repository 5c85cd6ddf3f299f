"""Functions that are called with every verdict that ``check`` or ``observe`` reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
