"""A function that is sent by value is pickled again as soon as anything in it may have changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_equivalence import Rank, check
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.fingerprint import Changeable, stamp
from tests.package.own_cases import own_case, right_step

CONSTANT = 1.0
LIST = [1.0]


def leaf() -> float:
    return CONSTANT


def through_another() -> float:
    return leaf()


def from_a_list() -> float:
    return LIST[0]


class Named:
    value = 1.0

    def read(self) -> float:
        return self.value


def from_a_class() -> float:
    return Named().read()


def from_a_default(value: float = 1.0) -> float:
    return value


def nested() -> float:
    def inner() -> float:
        return CONSTANT

    return inner()


def there(function: Callable[[], Any]) -> Any:
    """What the function returns where it is opened, as a rank would open it."""
    _, apart, body = pickling.loads_around(pickling.dumps(function, None))
    opened, _ = pickling.loads(apart, body)
    return opened()


def there_itself(function: Callable[[], Any]) -> Any:
    """The function as it is opened there."""
    _, apart, body = pickling.loads_around(pickling.dumps(function, None))
    return pickling.loads(apart, body)[0]


def set_constant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.CONSTANT", 2.0)


def set_function(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.leaf", lambda: 2.0)


def set_list(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.LIST", [2.0])


def set_class(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Named, "value", 2.0)


def set_method(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Named, "read", lambda self: 2.0)


def set_default(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(from_a_default, "__defaults__", (2.0,))


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (leaf, set_constant),
        (through_another, set_constant),
        (through_another, set_function),
        (nested, set_constant),
        (from_a_list, set_list),
        (from_a_class, set_class),
        (from_a_class, set_method),
        (from_a_default, set_default),
    ],
)
def test_what_has_changed_arrives_changed(
    function: Callable[[], float],
    change: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert there(function) == there(function) == 1.0
    change(monkeypatch)
    assert there(function) == 2.0
    monkeypatch.undo()
    assert there(function) == 1.0


def test_a_partial_arrives_with_its_arguments() -> None:
    assert [there(partial(from_a_default, value=value)) for value in (1.0, 2.0, 1.0)] == [1, 2, 1]


def test_a_list_that_changes_in_place_arrives_changed() -> None:
    assert there(from_a_list) == 1.0
    LIST[0] = 2.0
    try:
        assert there(from_a_list) == 2.0
    finally:
        LIST[0] = 1.0


def test_a_closure_arrives_with_what_is_in_it_now() -> None:
    value = 1.0

    def read() -> float:
        return value

    assert there(read) == 1.0
    value = 2.0
    assert there(read) == 2.0


def test_what_has_not_changed_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    there(through_another)
    monkeypatch.setattr(pickling, "_pickled", None)
    assert there(through_another) == 1.0
    with pytest.raises(TypeError):
        there(from_a_list)  # a list may change without a trace: pickled each time


def test_a_module_that_travels_with_its_contents_arrives_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper that the ranks could not import: under no name that leads to its file."""
    path = tmp_path / "helper.py"
    path.write_text("SCALE = 1.0\ndef scale():\n    return SCALE\n")
    spec = spec_from_file_location("helper_that_nobody_can_import", path)
    assert spec is not None
    assert spec.loader is not None
    helper = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, helper.__name__, helper)
    spec.loader.exec_module(helper)
    assert there(lambda: helper.SCALE) == there(lambda: helper.scale()) == 1.0
    read = lambda: (helper.SCALE, helper.scale())  # noqa: E731
    assert there(read) == (1.0, 1.0)
    monkeypatch.setattr(helper, "SCALE", 0.0)
    assert there(read) == (0.0, 0.0)


def test_torchs_own_kinds_of_modules_travel_by_name() -> None:
    """A script that sets cuDNN's benchmark or a precision in its step."""

    def read() -> tuple[bool, str]:
        return torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.fp32_precision

    assert there(read) == read()


def test_a_function_of_another_file_is_another_one() -> None:
    """Though it is the same to the letter: tracebacks name its file."""
    found = []
    for name in ("one.py", "other.py"):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile("def where():\n    return 1", name, "exec"), namespace)
        found.append(there_itself(namespace["where"]).__code__.co_filename)
    assert found == ["one.py", "other.py"]


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}, object(), torch.zeros(1), nn.Linear(1, 1)])
def test_what_can_change_without_a_trace_has_no_stamp(value: Any) -> None:
    with pytest.raises(Changeable):
        stamp(lambda: value, lambda _: True)


def test_what_the_ranks_open_stays_apart_from_check_to_check() -> None:
    """A rank gets its own copy each time: what a step writes into its globals is gone."""
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
