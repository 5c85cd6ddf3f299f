"""What a library keeps from an earlier check on warm ranks changes no verdict."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, check
from ddp_equivalence.ranks.warm_ranks import warm_ranks

LIBRARY = '''
import os
import torch

os.environ["SET_BY_THE_LIBRARY"] = "1"


torch.backends.cudnn.benchmark = True

class State:
    """Keeps the factor of the first one that is made, as singletons of libraries do."""
    kept = {}
    def __init__(self, factor):
        self.kept.setdefault("factor", factor)
        self.factor = self.kept["factor"]
'''


@pytest.fixture(autouse=True)
def new_ranks() -> Iterator[None]:
    """Earlier tests may have left libraries on the ranks, and these tests leave one."""
    warm_ranks().stop()
    yield
    warm_ranks().stop()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "library_with_state.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)


def build() -> nn.Module:
    return nn.Linear(3, 2)


def rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


CASE = Case(model=build, batch=rows, loss=loss, layout="1x2")


def step_with(factor: float) -> Any:
    def step(model: Any, shard: Any, rank: Any) -> None:
        from library_with_state import State  # type: ignore[import-not-found]

        net = DistributedDataParallel(model)
        (State(factor).factor * loss(net, shard)).backward()

    return step


@pytest.mark.usefixtures("library")
def test_a_right_step_is_the_same_whatever_an_earlier_check_left_in_a_library() -> None:
    wrong = check(CASE, step_with(3.0))
    assert (wrong.outcome, wrong.again.on_used_ranks) == ("different", None)
    right = check(CASE, step_with(1.0))
    assert (right.outcome, right.again.on_used_ranks) == ("same", "different")
    assert right.again.libraries_kept == ("library_with_state",)
    assert "Fresh ranks: same on them, which counts; different on ranks" in str(right)


@pytest.mark.usefixtures("library")
def test_a_wrong_step_is_different_on_both_and_the_report_says_so() -> None:
    assert check(CASE, step_with(1.0)).outcome == "same"

    def keeps_its_gradient(model: Any, shard: Any, rank: Any) -> None:
        loss(model, shard).backward()

    verdict = check(CASE, keeps_its_gradient)
    assert (verdict.outcome, verdict.again.on_used_ranks) == ("different", "different")
    assert verdict.cause == "no_all_reduce"
    assert "Fresh ranks: different on them as well" in str(verdict)


@pytest.mark.usefixtures("library")
def test_what_an_import_changes_in_the_process_is_no_change_of_the_step() -> None:
    verdict = check(CASE, step_with(1.0), fresh_ranks=True)
    assert (verdict.outcome, verdict.changed) == ("same", {})


def test_what_the_step_itself_sets_is_still_a_change() -> None:
    def sets_a_variable(model: Any, shard: Any, rank: Any) -> None:
        os.environ["SET_BY_THE_STEP"] = "1"
        step = DistributedDataParallel(model)
        loss(step, shard).backward()

    verdict = check(CASE, sets_a_variable)
    assert verdict.outcome == "unknown"
    assert "SET_BY_THE_STEP" in str(verdict)


@pytest.mark.usefixtures("as_if_alone")
def test_ranks_without_libraries_judge_once() -> None:
    def keeps_its_gradient(model: Any, shard: Any, rank: Any) -> None:
        loss(model, shard).backward()

    started = warm_ranks().started
    assert check(CASE, keeps_its_gradient).again.on_used_ranks is None
    assert warm_ranks().started <= started + 1
