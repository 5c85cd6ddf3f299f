"""Which line of a module's class gives a buffer its value."""

from __future__ import annotations

import inspect
import linecache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence.observed_scripts.in_script.kept_tensors import line_that_assigns


class Memory(nn.Module):
    """Keeps what it has seen in buffers."""

    assigned: Tensor
    copied: Tensor
    written: Tensor
    added: Tensor
    twice: Tensor
    never: Tensor
    first: Tensor
    second: Tensor
    third: Tensor
    data: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in Memory.__annotations__:
            self.register_buffer(name, torch.zeros(4))

    def forward(self, inputs: Tensor) -> Any:
        self.assigned = inputs
        self.copied.copy_(inputs)
        self.written[:2] = inputs[:2]
        self.added += inputs
        (self.first, (self.second, *_)) = inputs, (inputs, inputs)
        self.third.data.fill_(1.0)
        self.data = inputs
        self.twice = inputs
        self.twice = self.twice + self.never.abs()
        return self.twice


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("assigned", "self.assigned = inputs"),
        ("copied", "self.copied.copy_(inputs)"),
        ("written", "self.written[:2] = inputs[:2]"),
        ("added", "self.added += inputs"),
        ("first", "(self.first, (self.second, *_)) = inputs, (inputs, inputs)"),
        ("second", "(self.first, (self.second, *_)) = inputs, (inputs, inputs)"),
        ("third", "self.third.data.fill_(1.0)"),
        ("data", "self.data = inputs"),
    ],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_the_one_line_that_writes_a_buffer_is_found(name: str, line: str, depth: int) -> None:
    module = nn.Sequential(Memory()) if depth else Memory()
    place = line_that_assigns(module, f"0.{name}" if depth else name)
    assert place is not None
    assert (place.file, place.function) == (inspect.getsourcefile(Memory), "forward")
    assert linecache.getline(place.file, place.number).strip() == line


@pytest.mark.parametrize("name", ["twice", "never", "unknown"])
def test_several_lines_or_none_are_not_guessed(name: str) -> None:
    assert line_that_assigns(Memory(), name) is None


@pytest.mark.parametrize("buffer", ["running_mean", "inside.a.wrapper"])
def test_nothing_is_said_of_classes_of_libraries_and_of_what_is_in_a_wrapper(buffer: str) -> None:
    assert line_that_assigns(nn.BatchNorm1d(2), buffer) is None


def inside_a_function() -> type[nn.Module]:
    class Described(nn.Module):
        text = """
This line is indented less than its class.
"""

        def forward(self, inputs: Tensor) -> Tensor:
            self.centre = inputs
            return inputs

    return Described


def test_a_class_whose_source_cannot_be_read_alone_is_left_out() -> None:
    assert line_that_assigns(inside_a_function()(), "centre") is None
