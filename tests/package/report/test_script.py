"""An exported script runs without this package and shows the same difference as the check."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Case, Rank, check
from ddp_equivalence.commands.main import main
from ddp_equivalence.commands.user_file import load
from ddp_equivalence.reference import big_batch
from ddp_equivalence.report.script import export
from ddp_equivalence.strategies import STRATEGIES, catalogue
from tests.package import own_cases
from tests.package.own_cases import loss, own_case, right_step
from tests.package.someone_elses_run import run

FACTOR = 3  # too much

MINE = """
from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import beside
from ddp_equivalence import Case, Rank

case = Case(
    model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    batch=lambda generator: torch.randn(12, 3, generator=generator),
    loss=beside.loss,
    layout="2x1",
)

def step(model: nn.Module, rows: torch.Tensor, rank: Rank) -> None:
    assert (rank.node, rank.local_rank, rank.local_world_size) == (rank.rank, 0, 1)
    ddp = DistributedDataParallel(model)
    beside.loss(ddp, rows).backward()
    model[2].bias.grad *= beside.TOO_MUCH

def right(model, rows, rank):
    ddp = DistributedDataParallel(model)
    beside.loss(ddp, rows).backward()
"""

BESIDE = "TOO_MUCH = 1.75\n\ndef loss(model, rows):\n    return model(rows).square().mean()\n"


def torchrun(path: Path, ranks: int) -> tuple[int, str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    without_us = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*launcher, str(path)],
        cwd=path.parent,
        env=without_us,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def by_itself(path: Path) -> dict[str, Any]:
    """The script's own names, without running it; it imports nothing of this package."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names
    }
    imported |= {one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    assert not [name for name in imported if name.startswith(("ddp_equivalence", "tests"))]
    names: dict[str, Any] = {"__name__": __name__, "__doc__": "how to run it"}
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
    return names


def assert_same_big_batch(names: dict[str, Any], case: Case, **options: Any) -> None:
    expected = big_batch(case, **options).expected
    found = names["on_one_device"](torch.float64)
    assert sorted(found) == sorted(expected)
    for name, truth in expected.items():
        assert (found[name] is None) == (truth is None)
        assert truth is None or torch.equal(found[name].to_dense(), truth.to_dense())


@pytest.fixture
def their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of theirs; what is imported from its folder is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "beside.py").write_text(BESIDE)
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    yield path
    for name in sys.modules.keys() - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


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
    assert "7.5e-01" in text, "the report says the same"


def test_where_a_strategy_is_right_the_script_ends_with_same(tmp_path: Path) -> None:
    path = export(Case(model="mlp", loss="mse_mean", layout="1x2"), "ddp_mean", tmp_path)
    code, shown = torchrun(path, ranks=2)
    assert code == 0, shown
    assert "same: 4 of 4 parameters agree with one big batch" in shown


def test_uneven_shards_on_two_nodes_differ_as_the_verdict_says(tmp_path: Path) -> None:
    case = own_case(layout="2x2", shards="6+3+2+1")
    verdict = check(case, right_step)
    path = export(case, right_step, tmp_path, headline=str(verdict).splitlines()[0])
    code, shown = torchrun(path, ranks=4)
    assert code == 1, shown
    assert verdict.comparison is not None
    for one in verdict.comparison.parameters:
        errors = " ".join(f"{rank.error:.1e}" for rank in one.by_rank)
        ratios = " ".join(f"{rank.ratio:.3f}" for rank in one.by_rank)
        assert re.search(rf"^{one.name} +\S+  {re.escape(f'{errors} | {ratios}')}$", shown, re.M)
    assert verdict.comparison.worst is not None
    assert f"the worst is {verdict.comparison.worst.name}" in shown
    assert "right_step is not big_batch: uneven_shards_weighted_equally" in path.read_text()


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
    assert len(path.read_text().splitlines()) < 320


@pytest.mark.parametrize("first", ["from __future__ import annotations", ""], ids=["text", ""])
def test_annotations_stay_where_they_mean_something(
    their_file: Path, tmp_path: Path, first: str
) -> None:
    """Without the import they are looked at when the script starts: Rank has to be there."""
    their_file.write_text(MINE.replace("from __future__ import annotations", first))
    theirs = load(their_file, "step")
    path = export(theirs.case, theirs.step, tmp_path)
    assert "def step(model: nn.Module, rows: torch.Tensor, rank: Rank) -> None:" in path.read_text()
    assert ("from __future__" in path.read_text()) == bool(first)
    assert_same_big_batch(by_itself(path), theirs.case)


class Local(nn.Module):
    """Has a name of the script's own in it."""

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
    """Has no source but this."""


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
    """A trainer whose step is a method of an instance."""

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
        (step_with_the_case, "CASE is a Case, of which only fields can be used"),
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
