"""Which lines run, and what local names hold when their function ends."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from typing import Any

import torch

from ddp_equivalence.measurement.observer import LocalsSeen


def seen_of(function: Any, *arguments: Any) -> tuple[LocalsSeen, dict[str, str]]:
    """What was seen while the function ran, and of its own local names."""
    seen = LocalsSeen()
    with seen.watching(), contextlib.suppress(ZeroDivisionError):
        function(*arguments)
    code = inspect.unwrap(getattr(function, "__func__", function)).__code__
    return seen, seen.values[code.co_filename, code.co_firstlineno]


def test_values_are_those_at_the_end_of_the_function() -> None:
    def counted(x: Any) -> None:
        x = torch.zeros(2, 3)
        n = len(x)
        assert n == 2

    assert seen_of(counted, 1)[1] == {"x": "tensor float32 2x3", "n": "int"}


def test_values_of_a_function_that_raises_are_seen() -> None:
    def failing(x: float) -> float:
        n = 1
        return n / x

    assert seen_of(failing, 0)[1] == {"x": "int", "n": "int"}


class Holder:
    def __init__(self) -> None:
        self.x, self.n = torch.ones(2), 3

    def method(self) -> None:
        y = self.n
        assert y


class Strange:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def method(self) -> None:
        pass


def test_objects_that_answer_with_errors_do_not_disturb_the_step() -> None:
    gone = weakref.proxy(Holder())

    def holding(one: Any, other: Any) -> None:
        pass

    found = seen_of(holding, gone, Strange())[1]
    assert found == {"one": weakref.ProxyType.__name__, "other": "Strange"}


def test_a_thread_that_somebody_traces_is_left_alone() -> None:
    def tracer(*_: Any) -> None:
        return None

    seen, before = LocalsSeen(), sys.gettrace()
    sys.settrace(tracer)
    try:
        with seen.watching():
            Holder().method()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert seen == LocalsSeen()
