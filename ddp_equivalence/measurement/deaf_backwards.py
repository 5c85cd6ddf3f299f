"""Notes which backward methods of the user's own do not use the gradient that they are given.

What a method computes is followed from the gradient that it gets: a gradient that it returns, and
that nothing of this went into, is the same whatever comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from dis import get_instructions
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from ddp_equivalence.measurement.operations import DeafBackward
from ddp_equivalence.ranks.torch_frames import counts_as_torch

TO_PYTHON = frozenset({"_local_scalar_dense", "is_nonzero", "equal"})
"""Operations after which Python knows something of a tensor, and may go on with it."""

UNSEEN = frozenset({"numpy", "tolist", "data_ptr", "from_numpy", "numba", "triton"})
"""A method that uses one of these names may compute what no operation of torch shows."""


@dataclass
class _Running:
    """A backward method that runs. ``reached``: the addresses of the storages that the gradient
    which it was given has gone into. ``is_known``: False once Python has read one of them.
    """

    reached: set[int] = field(default_factory=set)
    is_known: bool = True


class DeafBackwards:
    """``address_of``: that of a tensor's storage. ``is_as_written``: True if a tensor holds what
    the last operation that wrote to it has left there.
    """

    def __init__(
        self,
        address_of: Callable[[Tensor], int | None],
        is_as_written: Callable[[Tensor], bool],
    ) -> None:
        self._address_of = address_of
        self._is_as_written = is_as_written
        self._running: list[_Running] = []
        self._deaf: dict[tuple[str, int], bool] = {}

    @property
    def found(self) -> tuple[DeafBackward, ...]:
        """The methods, with the inputs whose gradient never depended on the one that came in."""
        by_name: dict[str, list[int]] = {}
        for (name, number), is_deaf in sorted(self._deaf.items()):
            if is_deaf:
                by_name.setdefault(name, []).append(number)
        return tuple(DeafBackward(name, tuple(inputs)) for name, inputs in by_name.items())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        with (
            patch.object(BackwardCFunction, "apply", self._watched(BackwardCFunction.apply)),
            patch.object(
                BackwardCFunction, "apply_boxed", self._watched(BackwardCFunction.apply_boxed)
            ),
        ):
            yield

    def after_operation(self, name: str, given: Iterable[Tensor], left: Iterable[Tensor]) -> None:
        """An operation of torch has run. ``left``: what it returned, or wrote to."""
        if not self._running:
            return
        read, written = self._addresses(given), self._addresses(left)
        for one in self._running:
            if read & one.reached:
                one.reached |= written
                one.is_known = one.is_known and name not in TO_PYTHON

    def _watched(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        @counts_as_torch
        def watched(context: Any, *arguments: Any) -> Any:
            given = [one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)]
            running = _Running(self._addresses(given))
            self._running.append(running)
            try:
                returned = apply(context, *arguments)
            finally:
                self._running.remove(running)
            if running.is_known and _matters(given) and not _may_hide(context):
                self._note(context, running, returned)
            return returned

        return watched

    def _note(self, context: Any, running: _Running, returned: object) -> None:
        name = type(context)._forward_cls.__name__
        is_unused = _never_reads_gradients(context)
        gradients = returned if isinstance(returned, tuple) else (returned,)
        for number, one in enumerate(gradients):
            if isinstance(one, Tensor) and bool(one.any()):
                address = self._address_of(one)
                is_known = address is not None and (is_unused or self._is_as_written(one))
                is_deaf = is_known and address not in running.reached
                self._deaf[name, number] = is_deaf and self._deaf.get((name, number), True)

    def _addresses(self, tensors: Iterable[Tensor]) -> set[int]:
        found = (self._address_of(one) for one in tensors)
        return {one for one in found if one is not None}


def _matters(given: Iterable[Tensor]) -> bool:
    """True unless all that comes in is 1, with which every product is the same."""
    return any(bool((one != 1).any()) for one in given)


def _never_reads_gradients(context: Any) -> bool:
    """True if no instruction of the method uses any of its arguments but the first."""
    code = _code_of(context)
    if code is None or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        return False
    names = set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    return bool(names) and not any(
        names.intersection(one.argval if isinstance(one.argval, tuple) else (one.argval,))
        for one in get_instructions(code)
        if isinstance(one.argval, str | tuple)
    )


def _code_of(context: Any) -> CodeType | None:
    method = context._get_user_fn()
    code = getattr(getattr(method, "__wrapped__", method), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _may_hide(context: Any) -> bool:
    """True if the method may compute something that is not seen here."""
    code = _code_of(context)
    return code is None or bool(UNSEEN.intersection(code.co_names))
