"""A function that is sent by value still knows the file that it stands in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import cloudpickle
import pytest

from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.pickling import dumps_with_files


def on_a_rank(function: Callable[[], Any]) -> Any:
    """The function as a rank receives it."""
    _, by_value, body = pickling.split(pickling.dumps(function, None))
    return pickling.loads(by_value, body)[0]


def in_a_worker(function: Callable[[], Any]) -> Any:
    """The function as a worker of a data loader receives it."""
    return cloudpickle.loads(dumps_with_files(function))


def local_functions() -> list[Callable[[], int]]:
    """Functions that no process can import."""

    def plain() -> int:
        return 1

    def with_code_inside() -> int:
        return (lambda: 1)()

    class Local:
        @staticmethod
        def method() -> int:
            return 1

    return [plain, with_code_inside, Local.method, lambda: 1]


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and all code inside it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from codes(one)


@pytest.mark.parametrize("sent", [on_a_rank, in_a_worker])
@pytest.mark.parametrize("function", local_functions())
def test_code_keeps_its_file_and_its_lines(
    function: Callable[[], int], sent: Callable[[Callable[[], int]], Any]
) -> None:
    received = sent(function)
    assert received is not function
    assert received() == 1
    found, before = list(codes(received.__code__)), list(codes(function.__code__))
    assert [one.co_filename for one in found] == [__file__] * len(before)
    assert [one.co_firstlineno for one in found] == [one.co_firstlineno for one in before]
