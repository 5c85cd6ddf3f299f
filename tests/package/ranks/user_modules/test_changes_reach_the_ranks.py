"""What the caller has changed in a module since its import reaches the ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Rank
from tests.package.own_cases import loss, right_step
from tests.package.ranks import many_kinds
from tests.package.ranks.user_modules.training_module import SAME, SUMMED, TRAIN, outcome, step_with


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


def set_instance_attribute(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train.options, "average", False)


def set_default(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train.averages, "__kwdefaults__", {"also": False})


def add_to_set(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "SKIPPED", {"average"})


def change_tensor(train: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "WEIGHT", train.WEIGHT * 2)


CHANGES = [
    *(set_global, set_function, set_class_attribute, set_method, set_class, set_item),
    *(set_item_beside_one_of_the_rank, set_instance_attribute, set_default),
    *(add_to_set, change_tensor),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_module_reaches_the_ranks_and_ends_with_it(
    train: Any, change: Callable[..., None]
) -> None:
    step = step_with(train)
    with pytest.MonkeyPatch.context() as patch:
        change(train, patch)
        assert outcome(step) == SUMMED
    assert outcome(step) == SAME


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
