"""What ranks change in a module ends with the check, and warm ranks go on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Rank
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import loss, right_step
from tests.package.ranks import many_kinds
from tests.package.ranks.user_modules.training_module import SAME, SUMMED, outcome, step_with


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


@pytest.mark.usefixtures("as_if_alone")
def test_ranks_that_use_such_a_module_are_used_again() -> None:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        assert many_kinds.right()
        right_step(model, shard, rank)

    assert outcome(step) == SAME
    started = warm_ranks().started
    assert [outcome(step) for _ in range(2)] == [SAME] * 2
    assert warm_ranks().started == started


def test_the_modules_of_the_caller_are_left_as_they_are(train: Any) -> None:
    train.AVERAGE = False
    before = {**vars(train)}, {**train.SETTINGS}, {**vars(train.options)}
    assert outcome(step_with(train)) == SUMMED
    assert all(vars(train)[name] is value for name, value in before[0].items())
    assert (before[1], before[2]) == (train.SETTINGS, vars(train.options))


@pytest.mark.usefixtures("as_if_alone")
def test_warm_ranks_are_used_again_whatever_the_modules_hold(train: Any) -> None:
    """The first difference starts one rank more: the step also runs on one rank alone."""
    step = step_with(train)
    train.AVERAGE = False
    assert outcome(step) == SUMMED
    started = warm_ranks().started
    for value, expected in ((True, SAME), (False, SUMMED), (True, SAME)):
        train.AVERAGE = value
        assert outcome(step) == expected
    assert warm_ranks().started == started
