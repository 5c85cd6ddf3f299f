"""Functions of many kinds are written as source in a script; others are refused by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Case, Rank, check
from ddp_equivalence.commands.user_file import load
from ddp_equivalence.report.script import export
from tests.package import own_cases
from tests.package.own_cases import loss, own_case, right_step
from tests.package.report.exported_scripts import MINE, assert_same_big_batch, by_itself

FACTOR = 3  # too much


@pytest.mark.parametrize("first", ["from __future__ import annotations", ""], ids=["text", ""])
def test_annotations_stay_where_they_mean_something(
    their_file: Path, tmp_path: Path, first: str
) -> None:
    """Without the import, Python evaluates annotations when the script starts, and needs Rank."""
    their_file.write_text(MINE.replace("from __future__ import annotations", first))
    theirs = load(their_file, "step")
    path = export(theirs.case, theirs.step, tmp_path)
    assert "def step(model: nn.Module, rows: torch.Tensor, rank: Rank) -> None:" in path.read_text()
    assert ("from __future__" in path.read_text()) == bool(first)
    assert_same_big_batch(by_itself(path), theirs.case)


class Local(nn.Module):
    """Uses a name that the script uses, too."""

    def __init__(self, SEED: int = 3) -> None:  # noqa: N803
        super().__init__()
        self.linear = nn.Linear(5, SEED)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows)  # type: ignore[no-any-return]


def main_of_mine(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return own_cases.loss(model, batch) * FACTOR


def many_rows(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(rows, 5, generator=generator),
        "targets": torch.randn(rows, 3, generator=generator),
    }


def model() -> nn.Module:
    return nn.Linear(5, 3)


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return many_rows(generator, rows=6)


def build_with(width: int) -> Any:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))

    return build


def step_from(factor: float) -> Any:
    # The script has a function of this name, too.
    def on_this_rank(model: nn.Module, shard: Any, rank: Rank, power: float = factor) -> None:
        ddp = DistributedDataParallel(model)
        (factor**power * loss(ddp, shard)).backward()

    return on_this_rank


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (own_case(), right_step),
        (own_case(model=Local, loss=main_of_mine), step_from(2.0)),
        (own_case(model=build_with(4), batch=functools.partial(many_rows, rows=8)), right_step),
        (own_case(model=lambda: nn.Linear(5, 3), loss=lambda m, b: loss(m, b)), lambda m, b, r: m),
        (own_case(model=model, batch=batch), right_step),
        (own_case(dtype=None, shards="interleaved", layout="1+2"), right_step),
        (own_case(dtype=torch.bfloat16, layout="2x2-round-robin"), right_step),
    ],
    ids=["plain", "closure", "partial", "lambdas", "names of its locals", "as built", "bfloat16"],
)
def test_functions_of_many_kinds_are_written_as_source(
    case: Case, step: Any, tmp_path: Path
) -> None:
    path = export(case, step, tmp_path)
    names = by_itself(path)
    assert_same_big_batch(names, case)


def test_an_enclosed_step_keeps_the_values_around_it(tmp_path: Path) -> None:
    text = export(own_case(), step_from(2.5), tmp_path).read_text()
    assert "factor = 2.5" in text
    assert "power: float = 2.5" in text


class Kept:
    """A value of this class has no source, unless a module holds it under a name."""


KEPT = Kept()
CASE = own_case()
UNUSED = {"a": Kept}


def with_an_object(thing: Any) -> Any:
    def start(model: nn.Module, shard: Any, rank: Rank) -> None:
        print(thing)

    return start


def counting() -> Any:
    calls = 0

    def start(model: nn.Module, shard: Any, rank: Rank) -> None:
        nonlocal calls
        calls += 1

    return start


def step_that_checks(model: nn.Module, shard: Any, rank: Rank) -> None:
    check(CASE, right_step)


def step_with_the_case(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(CASE)


class Steps:
    """A trainer, whose step is a method."""

    def step(self, model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (with_an_object(torch.ones(2)), "a Tensor that no module holds"),
        (with_an_object(Kept()), "a Kept that no module holds"),
        (counting(), "it sets calls of the function around it"),
        (eval("lambda model, shard, rank: None"), "has no source"),
        (step_that_checks, "check of ddp_equivalence"),
        (step_with_the_case, "CASE is a Case, and only its fields can be used"),
        (Steps().step, "a Steps that no module holds"),
    ],
    ids=["tensor", "object", "nonlocal", "eval", "check", "case", "method"],
)
def test_what_cannot_be_written_is_refused_by_name(step: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadCase, match=r"^step = .*a function defined at the top level") as raised:
        export(own_case(), step, tmp_path / "out")
    assert says in str(raised.value)
    assert not (tmp_path / "out").exists(), "nothing half-written"


def test_a_model_that_cannot_be_written_is_named_as_such(tmp_path: Path) -> None:
    layer = nn.Linear(5, 3)
    with pytest.raises(BadCase, match=r"^model = 'lambda': .*a Linear that no module holds"):
        export(
            own_case(model=lambda: nn.Sequential(type(layer)(5, 3), type(layer)(3, 3))),
            right_step,
            tmp_path,
        )


def step_of_the_case(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (CASE.loss(ddp, shard) * CASE.seed).backward()  # type: ignore[operator]


def step_with_a_held_object(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(KEPT, UNUSED)


def test_fields_of_a_case_and_objects_of_a_module_are_written(tmp_path: Path) -> None:
    text = export(own_case(), step_of_the_case, tmp_path).read_text()
    assert "(loss(ddp, shard) * 0).backward()" in text
    text = export(own_case(), step_with_a_held_object, tmp_path).read_text()
    assert "KEPT = Kept()\n" in text
    assert text.index("class Kept:") < text.index("KEPT = Kept()")
    assert "CASE" not in text


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(BadCase, match=r"^directory = "):
        export(own_case(), right_step, tmp_path / "out")
