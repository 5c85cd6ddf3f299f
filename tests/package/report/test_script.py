"""An exported script runs without this package and shows the same difference as the check."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_equivalence import Case, check
from ddp_equivalence.commands.main import main
from ddp_equivalence.report.render import headline_text
from ddp_equivalence.report.script import export
from ddp_equivalence.report.script.render import COMPARING_MODULES
from ddp_equivalence.report.script.slicing.contents import PACKAGE, SLICEABLE
from ddp_equivalence.report.script.template_filler import CASE_ATTRIBUTES
from ddp_equivalence.strategies import STRATEGIES, catalogue
from ddp_equivalence.strategies.strategy import Task
from tests.package.own_cases import own_case, right_step
from tests.package.report.exported_scripts import (
    BESIDE,
    MINE,
    assert_same_big_batch,
    by_itself,
    torchrun,
)
from tests.package.someone_elses_run import run


def test_the_script_of_a_users_file_shows_the_difference_under_torchrun(
    their_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(their_file), "--export-repro", str(tmp_path / "out")]) == 1
    text = capsys.readouterr().out
    (path,) = (tmp_path / "out").iterdir()
    assert f"reproduction: {path} (torchrun --nproc-per-node 2 {path})" in text
    their_file.unlink()
    (tmp_path / "beside.py").unlink()
    code, shown = torchrun(path, ranks=2)
    assert code == 1, shown
    assert "different: 1 of 4 parameters, the worst is 2.bias" in shown
    assert re.search(r"^2\.bias +\S+  7\.5e-01 7\.5e-01 \| 1\.750 1\.750$", shown, re.MULTILINE)
    assert "differs: 2.bias, error 0.75" in text, "the report says the same"


def test_where_a_strategy_is_right_the_script_ends_with_same(tmp_path: Path) -> None:
    path = export(Case(model="mlp", loss="mse_mean", layout="1x2"), "ddp_mean", tmp_path)
    code, shown = torchrun(path, ranks=2)
    assert code == 0, shown
    assert "same: 4 of 4 parameters agree with one big batch" in shown


def test_uneven_shards_on_two_nodes_differ_as_the_verdict_says(tmp_path: Path) -> None:
    case = own_case(layout="2x2", shards="6+3+2+1")
    verdict = check(case, right_step)
    path = export(case, right_step, tmp_path, headline=headline_text(verdict))
    code, shown = torchrun(path, ranks=4)
    assert code == 1, shown
    assert verdict.comparison is not None
    for one in verdict.comparison.parameters:
        errors = " ".join(f"{rank.error:.1e}" for rank in one.by_rank)
        ratios = " ".join(f"{rank.ratio:.3f}" for rank in one.by_rank)
        assert re.search(rf"^{one.name} +\S+  {re.escape(f'{errors} | {ratios}')}$", shown, re.M)
    assert verdict.comparison.worst is not None
    assert f"the worst is {verdict.comparison.worst.name}" in shown
    docstring = " ".join(path.read_text().split())
    assert "different: right_step (" in docstring
    assert "[uneven_shards_weighted_equally]" in docstring


@pytest.mark.parametrize(("backend", "gpus", "needed"), [("gloo_cuda", 0, 1), ("nccl", 1, 2)])
def test_a_script_says_how_many_gpus_it_needs(
    backend: str, gpus: int, needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = by_itself(
        export(Case(model="mlp", loss="mse_mean", layout="1x2"), "ddp_mean", tmp_path)
    )
    names["BACKEND"] = backend
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=f"{backend} and needs {needed} GPUs, found {gpus}"):
        names["join_process_group"]()


def _a_few(strategy: str) -> list[catalogue.Trial]:
    """The first case of every kind of script that the strategy has."""
    kinds: dict[tuple[object, ...], catalogue.Trial] = {}
    for trial in catalogue.trials(strategy):
        padded = trial.case.shards == "no_valid_token"
        random = trial.case.model == "dropout"
        kind = (trial.compare, trial.steps != 1, trial.case.exact, padded, random)
        kinds.setdefault(kind, trial)
    return list(kinds.values())


@pytest.mark.parametrize("strategy", [n for n, one in STRATEGIES.items() if one.lane is None])
def test_every_strategy_has_a_script_with_the_same_big_batch(strategy: str, tmp_path: Path) -> None:
    for trial in _a_few(strategy):
        options: dict[str, Any] = {"compare": trial.compare, "steps": trial.steps}
        path = export(trial.case, strategy, tmp_path, name="script", **options)
        assert_same_big_batch(by_itself(path), trial.case, **options)


def test_the_script_of_a_plain_case_is_short(tmp_path: Path) -> None:
    path = export(Case(model="mlp", loss="mse_mean"), "ddp_mean", tmp_path)
    # People read the whole script in a bug report.
    assert len(path.read_text().splitlines()) <= 340


RENAMING = """
import copy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddp_equivalence import Case

def loss(model, rows):
    return model(rows).square().mean()

case = Case(
    model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    batch=lambda generator: torch.randn(12, 3, generator=generator),
    loss=loss,
    layout="1x2",
)

def wraps_parts(model, rows, rank):
    if isinstance(model[0], nn.Linear):
        model[0], model[2] = DistributedDataParallel(model[0]), DistributedDataParallel(model[2])
    loss(model, rows).backward()
    model[2].module.bias.grad *= 1.75

def returns_names_of_the_wrapper(model, rows, rank):
    ddp = DistributedDataParallel(copy.deepcopy(model))
    loss(ddp, rows).backward()
    found = {name: one.grad for name, one in ddp.named_parameters()}
    found["module.2.bias"] *= 1.75
    return found
"""


@pytest.mark.usefixtures("forget_imports")
@pytest.mark.parametrize(
    ("step", "steps", "differ", "bias"),
    [
        ("wraps_parts", 1, "1 of 4", "2.bias"),
        ("wraps_parts", 2, "5 of 8", "2.bias (step 1)"),
        ("returns_names_of_the_wrapper", 1, "1 of 4", "2.bias"),
    ],
)
def test_a_script_compares_renamed_parameters_under_their_own_names(
    step: str, steps: int, differ: str, bias: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(RENAMING)
    options = ["--steps", str(steps), "--export-repro", str(tmp_path / "out")]
    assert main(["check", f"{mine}:{step}", *options]) == 1
    (path,) = (tmp_path / "out").iterdir()
    code, shown = torchrun(path, ranks=2)
    assert code == 1, shown
    assert f"different: {differ} parameters, the worst is {bias}" in shown
    line = rf"^{re.escape(bias)} +\S+  7\.5e-01 7\.5e-01 \| 1\.750 1\.750$"
    assert re.search(line, shown, re.MULTILINE)


def test_where_nothing_differs_there_is_nothing_to_reproduce(
    their_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["check", f"{their_file}:right", "--export-repro", str(out)]) == 0
    assert "reproduction: none, there is nothing to reproduce (same)" in capsys.readouterr().out
    assert not out.exists()


THEIR_TESTS = (
    MINE.replace("2x1", "1x2").replace("assert ", "assert 1 or ")
    + """

def test_wrong(equivalence):
    equivalence.check(case, step)
    equivalence.assert_equivalent(case, lambda model, rows, rank: step(model, 2 * rows, rank))

def test_known(equivalence):
    assert equivalence.check(case, step).outcome == "different"
"""
)


def test_a_failing_test_leaves_a_script_for_every_difference_it_met(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "test_theirs.py").write_text(THEIR_TESTS)
    code, text = run(tmp_path, "--ddp-export-repro=out")
    assert code == 1, text
    scripts = sorted(path.name for path in (tmp_path / "out").iterdir())
    names = [f"repro_test_theirs.py_test_wrong-{number}.py" for number in (1, 2)]
    assert scripts == names, text
    for name in names:
        assert f"out/{name} (torchrun --nproc-per-node 2 out/{name})" in text
        by_itself(tmp_path / "out" / name)
    assert "reproduction" in text


@pytest.mark.parametrize(
    "module", [*(f"{PACKAGE}.{name}" for name in SLICEABLE), *COMPARING_MODULES]
)
def test_the_modules_that_scripts_take_definitions_from_exist(module: str) -> None:
    assert find_spec(module) is not None


def test_a_strategys_task_has_the_attributes_that_scripts_look_for() -> None:
    names = {field.name for field in fields(Task)}
    assert {attribute.removeprefix("task.") for attribute in CASE_ATTRIBUTES} <= names
