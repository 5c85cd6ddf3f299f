"""An exported script runs without this package and shows the same difference as the check."""

from __future__ import annotations

import copy
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Case, Rank, check
from ddp_equivalence.commands.main import main
from ddp_equivalence.report.render import headline_text
from ddp_equivalence.report.script import export
from tests.package import own_cases
from tests.package.own_cases import loss, own_case, right_step
from tests.package.report.exported_scripts import (
    BESIDE,
    MINE,
    assert_same_big_batch,
    by_itself,
    torchrun,
)
from tests.package.someone_elses_run import run


@pytest.fixture
def their_file(tmp_path: Path, forget_imports: None) -> Path:
    """A user's file. Modules that are imported from its folder are removed afterwards."""
    (tmp_path / "beside.py").write_text(BESIDE)
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_the_script_of_a_users_file_shows_the_difference_under_torchrun(
    their_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(their_file), "--export-repro", str(tmp_path / "out")]) == 1
    text = capsys.readouterr().out
    (path,) = (tmp_path / "out").iterdir()
    assert f"reproduction: {path} (torchrun --nproc-per-node 2 {path})" in text
    their_file.unlink()
    (tmp_path / "beside.py").unlink()
    code, shown = torchrun(path, ranks=2, forked=False)
    assert code == 1, shown
    assert "different: 1 of 4 parameters, the worst is 2.bias" in shown
    assert re.search(r"^2\.bias +\S+  7\.5e-01 7\.5e-01 \| 1\.750 1\.750$", shown, re.MULTILINE)
    assert "differs: 2.bias, error 0.75" in text, "the report says the same"


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


def wraps_parts(model: Any, shard: Any, rank: Rank) -> None:
    if isinstance(model[0], nn.Linear):
        model[0], model[2] = DistributedDataParallel(model[0]), DistributedDataParallel(model[2])
    loss(model, shard).backward()
    model[2].module.bias.grad *= 1.75


def returns_names_of_the_wrapper(model: nn.Module, shard: Any, rank: Rank) -> Any:
    ddp = DistributedDataParallel(copy.deepcopy(model))
    loss(ddp, shard).backward()
    found: dict[str, Any] = {name: one.grad for name, one in ddp.named_parameters()}
    found["module.2.bias"] *= 1.75
    return found


def test_the_script_of_a_plain_case_is_short(tmp_path: Path) -> None:
    text = export(own_case(), right_step, tmp_path).read_text()
    own = Path(own_cases.__file__).read_text()
    assert own in text, "the file is carried as it is"
    # People read the whole script in a bug report.
    assert len(text.splitlines()) - len(own.splitlines()) <= 500


@pytest.mark.parametrize(
    ("step", "steps", "differ", "bias"),
    [
        (wraps_parts, 1, "1 of 4", "2.bias"),
        (wraps_parts, 2, "5 of 8", "2.bias (step 1)"),
        (returns_names_of_the_wrapper, 1, "1 of 4", "2.bias"),
    ],
)
def test_a_script_compares_renamed_parameters_under_their_own_names(
    step: Any, steps: int, differ: str, bias: str, tmp_path: Path
) -> None:
    code, shown = torchrun(export(own_case(), step, tmp_path, steps=steps), ranks=2)
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


# Functions and values of many kinds.

FACTOR = 3  # too much


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


class Kept:
    """A value of this class has no source, unless a module holds it under a name."""


KEPT = Kept()
CASE = own_case()


def model_of_local_class() -> Any:
    width = 7

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3))

        def forward(self, rows: Tensor) -> Tensor:
            return self.layers(rows)  # type: ignore[no-any-return]

    return Net


def counting() -> Any:
    calls = 0

    def count(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return loss(model, batch) + 0 * calls

    return count


def calling_each_other() -> Any:
    def even(count: int) -> bool:
        return count == 0 or odd(count - 1)

    def odd(count: int) -> bool:
        return count != 0 and even(count - 1)

    return lambda model, batch: loss(model, batch) * (3 if even(4) else 2)


def with_an_object(thing: Any) -> Any:
    def start(model: nn.Module, shard: Any, rank: Rank) -> None:
        print(thing)

    return start


def of_the_case(model: nn.Module, batch: Any) -> Any:
    return CASE.loss(model, batch) * (CASE.seed + 1)  # type: ignore[operator]


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
        (own_case(model=model_of_local_class(), loss=calling_each_other()), right_step),
        (own_case(loss=of_the_case), with_an_object(KEPT)),
        (own_case(loss=counting()), with_an_object([Kept, "text", {1: (1.5, None)}])),
    ],
)
def test_functions_of_many_kinds_are_in_a_script(case: Case, step: Any, tmp_path: Path) -> None:
    assert_same_big_batch(by_itself(export(case, step, tmp_path)), case)


def test_an_enclosed_step_keeps_the_values_around_it(tmp_path: Path) -> None:
    step = by_itself(export(own_case(), step_from(2.5), tmp_path))["step"]
    assert step.__defaults__ == (2.5,)
    assert [cell.cell_contents for cell in step.__closure__] == [2.5]


class Steps:
    """A trainer, whose step is a method."""

    def step(self, model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("step", with_an_object(torch.ones(2)), "a Tensor that no module holds"),
        ("step", with_an_object(Kept()), "a Kept that no module holds"),
        ("step", with_an_object(check), "it uses ddp_equivalence.checking.check"),
        ("step", eval("lambda model, shard, rank: None"), "has no source"),
        ("step", Steps().step, "a Steps that no module holds"),
        ("model", functools.partial(copy.deepcopy, nn.Linear(5, 3)), "a Linear that no module"),
    ],
    ids=["tensor", "object", "check", "eval", "method", "model"],
)
def test_what_a_script_cannot_contain_is_refused_by_name(
    field: str, value: Any, says: str, tmp_path: Path
) -> None:
    case, step = (
        (own_case(), value) if field == "step" else (own_case(**{field: value}), right_step)
    )
    with pytest.raises(
        BadCase, match=rf"^{field} is .*a function defined at the top level"
    ) as raised:
        export(case, step, tmp_path / "out")
    assert says in str(raised.value)
    assert not (tmp_path / "out").exists(), "nothing half-written"


STARTED = """
import torch
from torch import nn
from ddp_equivalence import Case, check
from ddp_equivalence.reproduction import export

def loss(model, rows):
    return model(rows).square().mean()

def batch(generator):
    return torch.randn(4, 3, generator=generator)

case = Case(model=lambda: nn.Linear(3, 2), batch=batch, loss=loss)

def step(model, rows, rank):
    loss(model, rows).backward()

path = export(case, step, OUT)
verdict = check(case, step)
"""


def test_a_file_that_makes_checks_while_it_runs_has_a_script(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(STARTED.replace("OUT", repr(str(tmp_path / "out"))).partition("verdict")[0])
    subprocess.run([sys.executable, str(mine)], check=True, timeout=240)
    (path,) = (tmp_path / "out").iterdir()
    assert "path = export" not in path.read_text()
    assert len(by_itself(path)["on_one_device"](torch.float64)) == 2
