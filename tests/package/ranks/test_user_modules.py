"""The ranks run a user's modules as the judging process has them, not as their files say."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import BadCase, Rank, check
from ddp_equivalence.ranks.server import START_METHOD_VARIABLE
from ddp_equivalence.ranks.user_modules import carried
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import loss, own_case, right_step
from tests.package.ranks import many_kinds

TRAIN = '''
"""A training module as a user writes it, with its settings in every usual place."""

import logging
import os
import re
import sys
import threading
import argparse

import torch
import torch.distributed as dist

AVERAGE = True
EXTRA = None
STEP = 0
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
PLACES = {"world": int(os.environ.get("WORLD_SIZE", "1")), "average": True}
SETTINGS = {"average": True, "inner": {"average": True}}
FACTORS = [1.0]
SKIPPED = set()
LOCK = threading.Lock()
LOG = logging.getLogger(__name__)
PATTERN = re.compile("a+")
PARSER = argparse.ArgumentParser()
MISSING = object()
WEIGHT = torch.ones(1)
HANDLE = sys.stderr


class Config:
    average = True

    def wanted(self):
        return True


class Options:
    def __init__(self):
        self.average = True
        self.lock = threading.Lock()


class Raising:
    def __eq__(self, other):
        raise RuntimeError("never compare me")

    __hash__ = None

    def __reduce__(self):
        raise RuntimeError("never pickle me")


RAISING = Raising()
options = Options()
default_options = options


def divide(gradient, world):
    gradient /= world


def averages(chosen=options, *, also=True):
    values = [
        AVERAGE, SETTINGS["average"], SETTINGS["inner"]["average"], Config.average,
        Config().wanted(), options.average, chosen.average, default_options.average, also,
        "average" not in SKIPPED, FACTORS == [1.0], bool(WEIGHT == 1), EXTRA is None,
        PLACES["average"],
    ]
    assert WORLD_SIZE == dist.get_world_size() == PLACES["world"]
    return all(values)


def counting():
    count = 0

    def count_up():
        nonlocal count
        count += 1
        return count

    return count_up


count_up = counting()


def reduce_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if averages():
            divide(parameter.grad, dist.get_world_size())


def reduce_once(model):
    global STEP
    STEP += 1
    SETTINGS["inner"].setdefault("steps", []).append(STEP)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if STEP == 1 and count_up() == 1 and len(SETTINGS["inner"]["steps"]) == 1:
            divide(parameter.grad, dist.get_world_size() ** 1)
'''

SAME, SUMMED = ("same", None), ("different", "sum_not_mean")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which modules can be imported; they are forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def train(folder: Path) -> ModuleType:
    (folder / "trained.py").write_text(TRAIN)
    return importlib.import_module("trained")


def step_with(module: ModuleType) -> Callable[..., None]:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        loss(model, shard).backward()
        module.reduce_gradients(model)

    return step


def outcome(step: Callable[..., Any], **options: Any) -> tuple[str, str | None]:
    verdict = check(own_case(), step, **options)
    return verdict.outcome, verdict.cause


def set_global(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "AVERAGE", False)


def set_function(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "divide", lambda gradient, world: None)


def set_class_attribute(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train.Config, "average", False)


def set_method(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train.Config, "wanted", lambda self: False)


def set_class(train: Any, patch: pytest.MonkeyPatch) -> None:
    class Other:
        average = False

        def wanted(self) -> bool:
            return True

    patch.setattr(train, "Config", Other)


def set_item(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(train.SETTINGS, "average", False)


def set_item_beside_one_of_the_rank(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(train.PLACES, "average", False)


def set_inner_item(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(train.SETTINGS["inner"], "average", False)


def set_instance_attribute(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train.options, "average", False)


def set_default(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train.averages, "__kwdefaults__", {"also": False})


def add_to_set(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "SKIPPED", {"average"})


def change_list(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "FACTORS", [1.0, 2.0])


def change_tensor(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "WEIGHT", train.WEIGHT * 2)


def set_what_was_none(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "EXTRA", {"a": train.SETTINGS})


CHANGES = [
    *(set_global, set_function, set_class_attribute, set_method, set_class, set_item),
    *(set_item_beside_one_of_the_rank, set_inner_item, set_instance_attribute, set_default),
    *(add_to_set, change_list, change_tensor, set_what_was_none),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_module_reaches_the_ranks_and_ends_with_it(
    train: Any, change: Callable[..., None]
) -> None:
    step = step_with(train)
    assert outcome(step) == SAME
    with pytest.MonkeyPatch.context() as patch:
        change(train, patch)
        assert outcome(step) == SUMMED
        assert outcome(step) == SUMMED
    assert outcome(step) == SAME


def test_a_module_changed_before_the_first_check_is_judged_as_changed(train: Any) -> None:
    train.AVERAGE = False
    assert outcome(step_with(train)) == SUMMED


def test_a_module_whose_file_is_wrong_is_same_once_it_is_set_right(folder: Path) -> None:
    (folder / "wrong.py").write_text(TRAIN.replace("AVERAGE = True", "AVERAGE = False"))
    wrong: Any = importlib.import_module("wrong")
    assert outcome(step_with(wrong)) == SUMMED
    wrong.AVERAGE = True
    assert outcome(step_with(wrong)) == SAME


def test_a_function_imported_by_name_sees_the_settings_of_its_module(train: Any) -> None:
    reduce_gradients = train.reduce_gradients

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        loss(model, shard).backward()
        reduce_gradients(model)

    assert outcome(step) == SAME
    train.SETTINGS["average"] = False
    assert outcome(step) == SUMMED


def test_an_object_imported_by_name_is_the_one_that_its_module_has(train: Any) -> None:
    options, missing = train.options, train.MISSING

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        assert missing is train.MISSING
        loss(model, shard).backward()
        options.average = False
        train.reduce_gradients(model)

    assert outcome(step) == SUMMED


def test_a_module_imported_inside_the_step_arrives_changed(folder: Path, train: Any) -> None:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        import trained  # type: ignore[import-not-found]

        loss(model, shard).backward()
        trained.reduce_gradients(model)

    train.AVERAGE = False
    assert outcome(step, fresh_ranks=True) == SUMMED
    train.AVERAGE = True
    assert outcome(step, fresh_ranks=True) == SAME


def test_a_module_imported_by_a_name_made_at_run_time_arrives_changed(
    folder: Path, train: Any
) -> None:
    (folder / "chosen_rule.py").write_text("FACTOR = 2\n")
    rule: Any = importlib.import_module("chosen_rule")

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        factor = importlib.import_module("_".join(["chosen", "rule"])).FACTOR
        loss(model, shard).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= factor

    rule.FACTOR = 1
    assert outcome(step, fresh_ranks=True) == SUMMED
    rule.FACTOR = 2
    assert outcome(step, fresh_ranks=True) == SAME


def test_an_attribute_of_a_function_reaches_the_ranks(train: Any) -> None:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        assert train.divide.calls == [3]
        loss(model, shard).backward()
        train.reduce_gradients(model)

    train.divide.calls = [3]
    assert outcome(step) == SAME


def test_a_module_that_another_one_imports_arrives_changed(folder: Path) -> None:
    """With a package, a relative import, and a circular one."""
    package = folder / "mine" / "sub"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from mine.sub.train import reduce_gradients\n")
    (package / "settings.py").write_text("from mine.sub import train\nSETTINGS = {'on': True}\n")
    (package / "train.py").write_text(
        "import torch.distributed as dist\nfrom .settings import SETTINGS\n"
        "def reduce_gradients(model):\n    for p in model.parameters():\n"
        "        dist.all_reduce(p.grad)\n        p.grad /= 2 if SETTINGS['on'] else 1\n"
    )
    sub: Any = importlib.import_module("mine.sub")
    assert outcome(step_with(sub)) == SAME
    sub.settings.SETTINGS["on"] = False
    assert outcome(step_with(sub)) == SUMMED
    sub.settings.SETTINGS["on"] = True
    assert outcome(step_with(sub)) == SAME


def test_a_name_that_was_deleted_is_missing_on_the_ranks_too(train: Any) -> None:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        loss(model, shard).backward()
        train.reduce_gradients(model)
        assert not hasattr(train, "MISSING")

    del train.MISSING
    assert outcome(step) == SAME


def test_data_made_without_a_seed_is_that_of_the_caller(folder: Path) -> None:
    (folder / "random_data.py").write_text("import torch\nDATA = torch.randn(3, 5)\n")
    module: Any = importlib.import_module("random_data")
    data = module.DATA.tolist()

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        assert module.DATA.tolist() == data
        loss(model, shard).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size

    assert outcome(step) == SAME


def test_what_a_step_changes_in_a_module_does_not_reach_the_next_check(train: Any) -> None:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        loss(model, shard).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        train.STEP += 1
        train.SETTINGS["inner"].setdefault("steps", []).append(train.STEP)
        if train.STEP == train.count_up() == len(train.SETTINGS["inner"]["steps"]) == 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= rank.world_size

    assert [outcome(step) for _ in range(3)] == [SAME] * 3
    assert train.STEP == 0


def test_a_lazily_imported_module_that_the_caller_never_imported_is_fresh_each_time(
    folder: Path,
) -> None:
    (folder / "seldom.py").write_text("import torch\nCOUNT = torch.zeros(1)\n")

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        import seldom  # type: ignore[import-not-found]

        seldom.COUNT += 1
        loss(model, shard).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size if seldom.COUNT == 1 else 1

    assert [outcome(step) for _ in range(3)] == [SAME] * 3
    assert "seldom" not in sys.modules


def test_a_module_that_was_edited_and_reloaded_is_judged_as_it_is_now(folder: Path) -> None:
    file = folder / "edited.py"
    file.write_text(TRAIN)
    edited: Any = importlib.import_module("edited")
    assert outcome(step_with(edited)) == SAME
    file.write_text(TRAIN.replace("gradient /= world", "gradient /= 1.0  # wrong"))
    importlib.reload(edited)
    assert outcome(step_with(edited)) == SUMMED
    file.write_text(TRAIN)
    importlib.reload(edited)
    assert outcome(step_with(edited)) == SAME


def test_a_module_that_was_edited_and_not_reloaded_is_refused(folder: Path) -> None:
    file = folder / "edited_later.py"
    file.write_text(TRAIN)
    edited: Any = importlib.import_module("edited_later")
    file.write_text(TRAIN.replace("gradient /= world", "gradient /= 1.0  # wrong"))
    with pytest.raises(BadCase, match=r"edited_later\.divide.*reload"):
        check(own_case(), step_with(edited))


def test_a_module_that_reads_the_environment_when_imported_stays_as_the_caller_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TRAIN.replace("AVERAGE = True", "AVERAGE = os.environ.get('MINE') != 'no'")
    (folder / "from_environment.py").write_text(text)
    train: Any = importlib.import_module("from_environment")
    monkeypatch.setenv("MINE", "no")
    assert outcome(step_with(train)) == SAME
    monkeypatch.delenv("MINE")
    assert outcome(step_with(train)) == SAME
    monkeypatch.setenv("MINE", "no")
    importlib.reload(train)
    assert outcome(step_with(train)) == SUMMED


@pytest.mark.parametrize("value", [threading.Lock(), (n for n in range(3))])
def test_a_new_value_that_cannot_be_pickled_is_refused_by_name(train: Any, value: Any) -> None:
    train.SETTINGS["inner"]["handle"] = value
    with pytest.raises(BadCase, match=r"trained\.SETTINGS\['inner'\]\['handle'\]"):
        check(own_case(), step_with(train))


def test_a_value_that_is_too_large_to_travel_is_refused_by_name(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.EXTRA = None
    train.SETTINGS["rows"] = b"x" * (65 * 2**20)
    with pytest.raises(BadCase, match=r"trained\.SETTINGS\['rows'\].*MB"):
        check(own_case(), step_with(train))


def test_a_module_that_nobody_has_changed_differs_in_nothing_from_a_new_import() -> None:
    """It has a global of every kind: locks, files, random generators, models, hostile classes."""
    name = many_kinds.__name__
    assert not carried.changes({name}, ()).edits
    assert many_kinds.right()  # Python and torch then keep caches of their own there
    changes = carried.changes({name}, ())
    assert name in changes.compared
    assert not changes.edits


def test_ranks_that_use_such_a_module_are_used_again() -> None:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        assert many_kinds.right()
        right_step(model, shard, rank)

    assert outcome(step) == SAME
    started = warm_ranks().started
    assert [outcome(step) for _ in range(2)] == [SAME] * 2
    assert warm_ranks().started == started


def test_a_value_in_a_context_or_a_thread_reaches_the_ranks() -> None:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        assert (many_kinds.CONTEXT.get(), many_kinds.LOCAL.value) == (3, 4)
        right_step(model, shard, rank)

    token = many_kinds.CONTEXT.set(3)
    many_kinds.LOCAL.value = 4
    try:
        assert outcome(step) == SAME
    finally:
        many_kinds.CONTEXT.reset(token)
        del many_kinds.LOCAL.value


def test_a_module_that_only_ranks_can_import_is_not_judged_by_guessing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "only_ranks.py").write_text(TRAIN + "\nRANK = int(os.environ['RANK'])\n")
    monkeypatch.setenv("RANK", "0")
    module: Any = importlib.import_module("only_ranks")
    monkeypatch.delenv("RANK")
    module.AVERAGE = False
    verdict = check(own_case(), step_with(module))
    assert verdict.outcome == "unknown"
    assert "only_ranks can be imported on a rank, but not in a process that is no rank" in str(
        verdict
    )


def test_the_modules_of_the_caller_are_left_as_they_are(train: Any) -> None:
    train.AVERAGE = False
    before = {**vars(train)}, {**train.SETTINGS}, {**vars(train.options)}
    assert outcome(step_with(train)) == SUMMED
    assert all(vars(train)[name] is value for name, value in before[0].items())
    assert (before[1], before[2]) == (train.SETTINGS, vars(train.options))


def test_in_process_the_other_ranks_have_the_changes_too(folder: Path) -> None:
    (folder / "debugged.py").write_text(
        "import torch.distributed as dist\nSETTINGS = {'divide': True}\n"
        "def reduce_gradients(model):\n    for p in model.parameters():\n"
        "        dist.all_reduce(p.grad)\n        p.grad /= 2 if SETTINGS['divide'] else 1\n"
    )
    module: Any = importlib.import_module("debugged")
    assert outcome(step_with(module), in_process=True) == SAME
    module.SETTINGS["divide"] = False
    assert outcome(step_with(module), in_process=True) == SUMMED
    assert module.SETTINGS == {"divide": False}
    module.SETTINGS["divide"] = True
    assert outcome(step_with(module), in_process=True) == SAME


def test_spawned_ranks_have_the_changes_too(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_METHOD_VARIABLE, "spawn")
    train.SETTINGS["average"] = False
    assert outcome(step_with(train)) == SUMMED


def test_warm_ranks_are_used_again_whatever_the_modules_hold(train: Any) -> None:
    step = step_with(train)
    assert outcome(step) == SAME
    started = warm_ranks().started
    for value, expected in ((False, SUMMED), (True, SAME), (False, SUMMED)):
        train.AVERAGE = value
        assert outcome(step) == expected
    assert warm_ranks().started == started


def test_a_module_that_runs_a_command_when_it_is_imported_can_be_checked_again(
    folder: Path,
) -> None:
    """Looking for the command reads the environment under names that are bytes."""
    command = 'import subprocess\nCOMMIT = subprocess.run(["true"]).returncode\n'
    (folder / "with_command.py").write_text(command + TRAIN)
    step = step_with(importlib.import_module("with_command"))
    assert [outcome(step) for _ in range(3)] == [SAME] * 3
