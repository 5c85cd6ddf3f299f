"""Which lines run, and what local names hold when their function ends."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence.measurement import observer
from ddp_equivalence.measurement.observer import LocalsSeen, described


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


def test_values_of_a_generator_are_seen() -> None:
    def numbers(x: int) -> Iterator[int]:
        yield x
        late = "text"
        yield len(late)

    def consumed() -> None:
        list(numbers(1))

    seen, _ = seen_of(consumed)
    place = __file__, numbers.__code__.co_firstlineno
    assert seen.values[place] == {"x": "int", "late": "str"}


def test_a_decorated_function_has_the_line_of_its_first_decorator() -> None:
    def plain(f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def around(*arguments: Any) -> Any:
            return f(*arguments)

        return around

    @plain
    def decorated(x: float) -> None:
        y = x
        del x
        assert y

    assert seen_of(decorated, 1.0)[1] == {"y": "float"}


def test_lambdas_and_comprehensions_do_not_count_as_the_function_of_their_line() -> None:
    # fmt: off
    def one_line(x: int) -> Any: return (lambda z: [z,])("text")
    # fmt: on
    assert seen_of(one_line, 1)[1] == {"x": "int"}


class Holder:
    def __init__(self) -> None:
        self.x, self.n = torch.ones(2), 3

    def method(self) -> None:
        y = self.n
        assert y


class Slotted:
    __slots__ = ("n",)

    def method(self) -> None:
        self.n = 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor  # type: ignore[no-any-return]


def test_attributes_of_self_are_seen() -> None:
    found = seen_of(Holder().method)[1]
    assert found == {"self": "Holder", "y": "int", "self.x": "tensor float32 2", "self.n": "int"}
    assert seen_of(Slotted().method)[1] == {"self": "Slotted"}


def test_of_a_module_only_its_own_attributes_are_seen() -> None:
    found = seen_of(Net().forward, torch.ones(1, 2))[1]
    assert found["self.factor"] == "float"
    assert found["x"] == "tensor float32 1x2"
    assert not [name for name in found if name.startswith("self._")]


def test_objects_with_very_many_attributes_are_not_described() -> None:
    holder = Holder()
    holder.__dict__.update({f"a{i}": i for i in range(observer.MOST_ATTRIBUTES)})
    assert seen_of(holder.method)[1] == {"self": "Holder", "y": "int"}


def test_lines_that_ran_are_seen_and_others_are_not() -> None:
    def branches(x: int) -> int:
        if x:
            return 1
        return 2

    lines = seen_of(branches, 0)[0].lines[__file__]
    first = branches.__code__.co_firstlineno
    assert {first + 1, first + 3} <= lines
    assert first + 2 not in lines


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(3, dtype=torch.float64), "tensor float64 3"),
        (torch.tensor(1), "tensor int64"),
        (nn.Parameter(torch.ones(2, 1)), "tensor float32 2x1"),
        (None, "NoneType"),
        (nn.Linear(1, 1), "Linear"),
    ],
    ids=str,
)
def test_a_value_is_described_by_its_type_and_shape(value: object, text: str) -> None:
    assert described(value) == text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_no_shape_to_describe() -> None:
    assert described(torch.nested.nested_tensor([torch.ones(1)])) == "Tensor torch.float32"


def test_what_one_rank_has_seen_comes_before_what_another_has() -> None:
    one = LocalsSeen({"f": {1}}, {("f", 1): {"x": "int"}})
    one.add(LocalsSeen({"f": {2}, "g": {1}}, {("f", 1): {"x": "str", "y": "str"}}))
    assert one == LocalsSeen({"f": {1, 2}, "g": {1}}, {("f", 1): {"x": "int", "y": "str"}})


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
