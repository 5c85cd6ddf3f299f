"""What a module collects while others are imported, as a registry does, the ranks have too."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, nn

from ddp_equivalence import Rank, check
from ddp_equivalence.ranks.rank_set import SPENT
from tests.package.own_cases import loss, own_case
from tests.package.ranks.user_modules.training_module import SAME, SUMMED, outcome

REGISTRY = """
import dataclasses, os, threading
import torch.distributed as dist

@dataclasses.dataclass
class Row:
    name: str
    reduce: object
    settings: dict
    lock: object

PLAIN = {}
LISTED = []
ROWS = {}
ORDER = []
PAIRS = []
BY_FUNCTION = {}

class Base:
    kinds = {}

    def __init_subclass__(cls):
        Base.kinds[cls.__name__] = {"average": cls.average}

def row(name, **settings):
    def keep(function):
        if settings.get("on_ranks", True) or "RANK" not in os.environ:
            lock = threading.Lock() if settings.get("lock", True) else None
            ROWS[name] = Row(name, function, settings, lock)
            ORDER.append(ROWS[name])
            PAIRS.append((name, settings))
            LISTED.append(settings)
            BY_FUNCTION[function] = settings
        return function
    return keep

def average(model, settings):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if settings["average"]:
            parameter.grad /= dist.get_world_size()

def names():
    return list(ROWS)

def reduce_by_name(name, model):
    row = ROWS[name]
    assert any(one is row for one in ORDER), (row, ORDER)
    assert any(settings is row.settings for _, settings in PAIRS), PAIRS
    row.reduce(model, row.settings)
"""

ROWS = """
from {registry} import PLAIN, ROWS, Base, average, row

@row("{name}_mean", average=True, **{more})
def mean(model, settings):
    average(model, settings)

@row("{name}_sum", average=False, **{more})
def total(model, settings):
    average(model, settings)

class Kind_{name}(Base):
    average = True

SETTINGS = ROWS["{name}_mean"].settings
PLAIN["{name}"] = 1
"""

PLAIN_ROWS = 'from {registry} import PLAIN\nPLAIN["{name}"] = 1\n'


class Registry:
    """A registry in a module of its own, and functions that write and import modules of rows."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        (folder / f"{name}.py").write_text(REGISTRY)
        self.module: Any = importlib.import_module(name)

    def add(self, rows: str, **more: object) -> ModuleType:
        return importlib.import_module(self.write(rows, ROWS, **more))

    def write(self, rows: str, text: str, **more: object) -> str:
        """The name of the new module."""
        text = text.format(registry=self.name, name=rows, more=more)
        (self.folder / f"{self.name}_{rows}.py").write_text(text)
        return f"{self.name}_{rows}"


@pytest.fixture
def registry(folder: Path, request: pytest.FixtureRequest) -> Registry:
    """It has another name in each test, since the ranks keep what they have imported."""
    return Registry(folder, f"registry_{abs(hash(request.node.nodeid))}")


def step_that_has(module: Any, settings: dict[str, Any]) -> Callable[..., None]:
    """A step that refers to the module and to this object, but not to what put it there."""

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        loss(model, shard).backward()
        module.average(model, settings)

    return step


def step_by_name(module: Any, name: str) -> Callable[..., None]:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        loss(model, shard).backward()
        module.reduce_by_name(name, model)

    return step


ENTRIES: list[Callable[[Any], Any]] = [
    lambda module: module.ROWS["a_mean"].settings,
    lambda module: module.ORDER[0].settings,
    lambda module: module.PAIRS[0][1],
    lambda module: module.Base.kinds["Kind_a"],
]


def test_a_step_that_refers_only_to_an_entry_of_a_registry_gets_it(registry: Registry) -> None:
    module = registry.module
    for rows in "ab":
        registry.add(rows)
    for entry in ENTRIES:
        assert outcome(step_that_has(module, entry(module))) == SAME
    assert outcome(step_that_has(module, module.ROWS["b_sum"].settings)) == SUMMED


def test_an_entry_is_found_through_its_partial_and_its_bound_method(registry: Registry) -> None:
    registry.add("a")
    row = registry.module.ROWS["a_mean"]
    reduce_gradients = functools.partial(row.reduce, settings=row.settings)
    name = row.settings.get

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        loss(model, shard).backward()
        assert name("average") is True
        reduce_gradients(model)

    assert outcome(step) == SAME


def test_a_registry_has_all_its_entries_in_the_order_in_which_they_came(
    registry: Registry,
) -> None:
    for rows in "ba":
        registry.add(rows)
    module, expected = registry.module, list(registry.module.ROWS)
    by_name = step_by_name(module, "a_mean")

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        assert module.names() == expected == [one.name for one in module.ORDER]
        by_name(model, shard, rank)

    assert outcome(step) == SAME
    assert outcome(step_by_name(module, "b_sum")) == SUMMED


@pytest.mark.usefixtures("as_if_alone")
def test_entries_that_come_between_two_checks_reach_warm_ranks_and_stay(
    registry: Registry,
) -> None:
    settings = {"average": True}
    module = registry.module

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        assert module.names() == []
        loss(model, shard).backward()
        module.average(model, settings)

    assert outcome(step) == SAME
    assert outcome(step_that_has(module, {"average": False})) == SUMMED  # starts every set needed
    starts = SPENT.starts
    for rows in "cab":
        registry.add(rows)
        for _ in range(2):
            assert outcome(step_by_name(module, f"{rows}_mean")) == SAME
            assert outcome(step_by_name(module, f"{rows}_sum")) == SUMMED
    assert outcome(step_by_name(module, "c_mean")) == SAME
    assert SPENT.starts == starts


@pytest.mark.parametrize("rows", [ROWS, PLAIN_ROWS], ids=["rows", "plain"])
def test_an_import_inside_the_step_fills_the_registry_for_later_steps_too(
    registry: Registry, rows: str
) -> None:
    module = registry.module
    assert outcome(step_that_has(module, {"average": True})) == SAME
    name = registry.write("a", rows)
    start, end = name[:4], name[4:]

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        importlib.import_module(start + end)
        loss(model, shard).backward()
        assert module.PLAIN["a"] == 1
        module.average(model, {"average": True})

    assert [outcome(step) for _ in range(3)] == [SAME] * 3
    importlib.import_module(name)
    assert outcome(step) == SAME


def test_what_this_process_changes_in_a_filled_registry_is_changed_everywhere(
    registry: Registry,
) -> None:
    registry.add("a")
    module = registry.module
    del module.ROWS["a_sum"], module.ORDER[1], module.PAIRS[1]
    settings = {"average": True}
    module.ROWS["own"] = own = module.Row("own", module.average, settings, None)
    module.ORDER.insert(0, own)
    module.PAIRS.insert(0, ("own", settings))

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank, row: Any) -> None:
        assert row is module.ROWS["own"] is module.ORDER[0]
        assert row.settings is module.PAIRS[0][1]
        assert module.names() == ["a_mean", "own"]
        loss(model, shard).backward()
        module.reduce_by_name("own", model)
        module.ROWS["own"].settings["average"] = False

    assert outcome(functools.partial(step, row=own)) == SAME
    assert outcome(step_by_name(module, "a_mean")) == SAME


def test_an_object_of_a_list_that_this_process_changes_is_the_same_object_elsewhere(
    registry: Registry,
) -> None:
    first, second = (registry.add(rows) for rows in "ba")
    module: Any = registry.module
    module.LISTED.append({"average": False})

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        assert first.SETTINGS is module.LISTED[0] is module.ORDER[0].settings
        assert second.SETTINGS is module.LISTED[2] is module.PAIRS[2][1]
        assert module.BY_FUNCTION[second.mean] is module.LISTED[2]
        assert [one["average"] for one in module.LISTED] == [True, False, True, False, False]
        loss(model, shard).backward()
        module.reduce_by_name("a_mean", model)

    assert outcome(step) == SAME


def test_a_module_made_by_hand_travels_by_value(registry: Registry) -> None:
    made = ModuleType(f"{registry.name}_made")
    exec(ROWS.format(registry=registry.name, name="made", more={"lock": False}), vars(made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, made.__name__, made)
        assert outcome(step_by_name(registry.module, "made_mean")) == SAME
        assert outcome(step_by_name(registry.module, "made_sum")) == SUMMED


def test_an_entry_that_only_this_process_has_is_named(registry: Registry) -> None:
    registry.add("a", on_ranks=False)
    verdict = check(
        own_case(), step_that_has(registry.module, registry.module.ROWS["a_mean"].settings)
    )
    assert verdict.outcome == "unknown"
    words = " ".join(str(verdict).split())
    assert f"this rank has no {registry.name}.LISTED[0], which the step uses" in words, words
