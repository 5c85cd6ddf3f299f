"""Tells a listener of every collective that Python issues, and when somebody has waited for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(eq=False)
class Issued:
    """A collective at the moment when Python issues it.

    ``reduce_op``: such as ``SUM``; "" if it reduces nothing. ``ranks``: of its group. ``tensors``:
    what goes in; () afterwards. ``asynchronous``: a handle is returned to the caller. ``names``
    and ``call`` are the listener's own.
    """

    op: str
    reduce_op: str
    ranks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    asynchronous: bool
    names: tuple[str, ...] = ()
    call: int = -1


Listeners = tuple[Callable[[Issued, FrameType], object], Callable[[Issued], object]]
"""Told before a collective is issued, with the frame that issues it, and once its result is there
for the caller: after somebody has waited for it, or at once if there is no handle. Nothing keeps
the frame, since it would keep alive what the step has freed."""

_listeners: Listeners | None = None
_issued: list[tuple[Any, Issued]] = []
"""The handles and collectives that a listener knows of and nobody has waited for."""


@contextmanager
def listening(
    issuing: Callable[[Issued, FrameType], object], waited: Callable[[Issued], object]
) -> Iterator[None]:
    """Inside the block, tell these functions of every collective that Python issues.

    What they raise is ignored. ``waited`` is also told of collectives whose caller got no handle.
    """
    global _listeners
    _listeners = issuing, waited
    try:
        yield
    finally:
        _listeners = None
        _issued.clear()


@contextmanager
def nobody_listening() -> Iterator[None]:
    """Inside the block, no listener is told of any collective."""
    global _listeners
    listeners, _listeners = _listeners, None
    try:
        yield
    finally:
        _listeners = listeners


def some_are_pending() -> bool:
    """True if a listener knows of a collective that nobody has waited for."""
    return bool(_issued)


def inputs(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The tensors that go into a collective: those of the last argument that has any."""
    for argument in reversed(arguments):
        tensors = [leaf for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Tensor)]
        if tensors:
            return tuple(tensors)
    return ()


def tell_of(group: Any, op: str, arguments: tuple[Any, ...]) -> Issued | None:
    """Tell the listener of a collective that is about to be issued; None without a listener."""
    if _listeners is None:
        return None
    try:
        frame = sys._getframe(2)
        issued = Issued(
            op=op,
            reduce_op=next(filter(None, map(_reduce_op, arguments)), ""),
            ranks=tuple(dist.get_process_group_ranks(group)),
            tensors=inputs(arguments),
            asynchronous=bool(frame.f_locals.get("async_op", False)),
        )
        _listeners[0](issued, frame)
        issued.tensors = ()
    except Exception:  # a listener must not make the user's collective fail
        return None
    return issued


def _reduce_op(options: object) -> str:
    """The name of the operation in the options of a collective; "" if there is none."""
    operation = getattr(options, "reduceOp", None)
    if operation is None:
        return ""
    return str(getattr(operation, "op", operation)).rpartition(".")[2]


def remember(work: Any, issued: Issued) -> None:
    """The collective has this handle. A wait for the handle is told as one for the collective."""
    _issued.append((work, issued))


def tell_of_result(issued: Issued) -> None:
    """Tell the listener that what this collective leaves is in its tensors."""
    if _listeners is not None:
        with suppress(Exception):
            _listeners[1](issued)


def tell_of_wait(work: Any) -> None:
    """Tell the listener that the collective of this handle was waited for."""
    for number, (handle, issued) in enumerate(_issued):
        if handle is work:
            del _issued[number]
            tell_of_result(issued)
            return
