"""Lists of whole numbers are noticed wherever the user's code makes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from ddp_equivalence.measurement.calls import CodeLine, line_at
from ddp_equivalence.measurement.draws import IndexLists

pytestmark = pytest.mark.self_check

Noted = list[tuple[int, str, tuple[int, ...]]]


def noted_in(function: Callable[[], object]) -> Noted:
    """The number of the line below the beginning of the function, the name and the numbers."""
    found: Noted = []
    first = function.__code__.co_firstlineno

    def note(line: CodeLine, name: str, numbers: tuple[int, ...]) -> None:
        found.append((line.number - first, name, numbers))

    lists, lines = IndexLists(note), dict[int, CodeLine]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != __file__:
            return None
        if event == "call":
            lists.after(frame, None)
        elif id(frame) in lines:
            returned = argument if event == "return" else None
            lists.after(frame, lines[id(frame)], returned)
        if event == "line":
            lines[id(frame)] = line_at(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return found


def returns_a_tensor() -> object:
    return torch.arange(1, 9, 4)


def has_a_range() -> None:
    own = range(2, 8, 3)
    del own


def has_a_slice() -> None:
    own = slice(2, 5)
    del own


def has_an_open_slice() -> None:
    own = slice(2, None)
    del own


def has_an_array() -> None:
    own = np.arange(3)
    del own


class Keeper:
    """Keeps positions."""

    def __init__(self) -> None:
        self.own = [3, 4]
        self.name = "keeper"


def makes_a_keeper() -> None:
    Keeper()


def has_fractions() -> None:
    own = [0.5, 1.5]
    del own


@pytest.mark.parametrize(
    ("function", "line", "name", "numbers"),
    [
        (returns_a_tensor, 1, "returns_a_tensor()", (1, 5)),
        (has_a_range, 1, "own", (2, 5)),
        (has_a_slice, 1, "own", (2, 3, 4)),
        (has_an_array, 1, "own", (0, 1, 2)),
    ],
)
def test_a_list_is_noticed_at_the_line_that_made_it(
    function: Callable[[], object], line: int, name: str, numbers: tuple[int, ...]
) -> None:
    assert noted_in(function) == [(line, name, numbers)]


def test_a_list_that_an_object_keeps_is_noticed() -> None:
    found = noted_in(makes_a_keeper)
    assert [(name, numbers) for _, name, numbers in found] == [("self.own", (3, 4))]


def test_what_a_function_is_given_was_made_by_the_line_that_calls_it() -> None:
    def given(own: object) -> None:
        pass

    def gives() -> None:
        given([5, 7])

    assert noted_in(gives) == [(1, "own", (5, 7))]


@pytest.mark.parametrize("function", [has_fractions, has_an_open_slice])
def test_other_lists_are_not_noticed(function: Callable[[], object]) -> None:
    assert noted_in(function) == []
