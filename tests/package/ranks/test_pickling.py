"""A function that is sent by value arrives with everything in it as it is now."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_equivalence import Rank, check
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.pickling import dumps_with_files
from tests.package.own_cases import own_case, right_step

CONSTANT = 1.0
LIST = [1.0]


def leaf() -> float:
    return CONSTANT


def through_another() -> float:
    return leaf()


class Named:
    value = 1.0

    def read(self) -> float:
        return self.value


def from_a_class() -> float:
    return Named().read()


def from_a_default(value: float = 1.0) -> float:
    return value


def unpickled(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function as a rank receives it."""
    *_, work = pickling.split(pickling.dumps(function, None))
    received, _, _ = pickling.loads(work)
    return received


def result_on_rank(function: Callable[[], Any]) -> Any:
    """The result of the function after it was pickled and unpickled."""
    return unpickled(function)()


def set_constant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.CONSTANT", 2.0)


def set_function(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.leaf", lambda: 2.0)


def set_method(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Named, "read", lambda self: 2.0)


def set_default(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(from_a_default, "__defaults__", (2.0,))


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (through_another, set_constant),
        (through_another, set_function),
        (from_a_class, set_method),
        (from_a_default, set_default),
    ],
)
def test_a_function_that_has_changed_arrives_changed(
    function: Callable[[], float],
    change: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert result_on_rank(function) == result_on_rank(function) == 1.0
    change(monkeypatch)
    assert result_on_rank(function) == 2.0
    monkeypatch.undo()
    assert result_on_rank(function) == 1.0


def test_a_module_that_is_pickled_by_value_arrives_with_its_present_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks cannot import the module, because no import path leads to its file."""
    path = tmp_path / "helper.py"
    path.write_text("SCALE = 1.0\ndef scale():\n    return SCALE\n")
    spec = spec_from_file_location("helper_that_nobody_can_import", path)
    assert spec is not None
    assert spec.loader is not None
    helper = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, helper.__name__, helper)
    spec.loader.exec_module(helper)
    assert result_on_rank(lambda: helper.SCALE) == result_on_rank(lambda: helper.scale()) == 1.0
    read = lambda: (helper.SCALE, helper.scale())  # noqa: E731
    assert result_on_rank(read) == (1.0, 1.0)
    monkeypatch.setattr(helper, "SCALE", 0.0)
    assert result_on_rank(read) == (0.0, 0.0)


def test_modules_of_torch_with_a_class_of_their_own_are_pickled_by_name() -> None:
    """A script uses them to set cuDNN's benchmark or a precision in its step."""

    def read() -> tuple[bool, str]:
        return torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.fp32_precision

    assert result_on_rank(read) == read()


def test_globals_that_a_step_changes_are_as_before_in_the_next_check() -> None:
    """A rank unpickles the function anew for each check."""
    seen = 0

    def counts(model: nn.Module, shard: Any, rank: Rank) -> None:
        nonlocal seen
        seen += 1
        print("seen", seen)
        right_step(model, shard, rank)

    for _ in range(3):
        verdict = check(own_case(), counts)
        assert verdict.output[0].split() == ["seen", "1"]
    assert seen == 0


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


@pytest.mark.parametrize("sent", [unpickled, in_a_worker])
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


class Optimizer(torch.optim.Optimizer):
    """Torch puts its hooks around ``step`` when the first one is made."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any: ...


def test_the_hooks_of_a_rank_see_the_steps_of_an_optimizer_that_the_parent_made_first() -> None:
    def makes_a_step() -> list[str]:
        seen: list[str] = []
        handle = register_optimizer_step_pre_hook(lambda *given: seen.append("a step"))
        Optimizer([torch.zeros(1, requires_grad=True)]).step()
        handle.remove()
        return seen

    assert makes_a_step() == result_on_rank(makes_a_step) == ["a step"]
