"""The command line as its user types it: text, results and exit codes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from ddp_equivalence.commands.main import main
from tests.package.forks import completed
from tests.package.one_server import with_server_of_these_tests
from tests.package.someone_elses_run import LONGEST, PLUGINS

ROOT = Path(__file__).parents[3]

A_FEW = "tests/equivalence/test_ddp_gathered.py"
"""Of the suite, quickly collected."""

USER_FILE = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddp_equivalence import Case
from beside import loss

case = Case(
    model=lambda: nn.Linear(3, 2),
    batch=lambda generator: torch.randn(12, 3, generator=generator),
    loss=loss,
    layout="1x2",
)

def step(model, rows, rank):
    ddp = DistributedDataParallel(model)
    loss(ddp, rows).backward()

def doubled(model, rows, rank):
    ddp = DistributedDataParallel(model)
    (rank.world_size * loss(ddp, rows)).backward()

def raises(model, rows, rank):
    raise ValueError("oh")

uneven = (Case(model=case.model, batch=case.batch, loss=loss, shards="4+8"), step)
"""

BESIDE = "def loss(model, rows):\n    return model(rows).square().mean()\n"


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text(BESIDE)
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forget_imports: None) -> None:
    """The working folder; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, folder: Path | None = None) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "ddp_equivalence", *arguments]
    variables = with_server_of_these_tests({**os.environ, **PLUGINS, "PYTHONPATH": str(ROOT)})
    done = completed(command, folder or Path.cwd(), variables, LONGEST)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 0, "step is big_batch: same"),
        ((":step", "--layout=2x2", "--dtype=float32"), 0, "lambda-loss-2x2-equal-float32-seed0"),
        ((":ddp_mean",), 0, "ddp_mean is big_batch: same"),
        ((":doubled",), 1, "[sum_not_mean]"),
        (("::doubled",), 1, "different: doubled"),  # as pytest names tests
        ((":uneven",), 1, "uneven_shards_weighted_equally"),
        ((":raises",), 3, "ValueError: oh"),
    ],
)
def test_check_tells_same_from_different_from_not_judged(
    here: None,
    user_file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    name, *options = arguments or ("",)
    found = main(["check", f"{user_file}{name}", *options])
    text, errors = capsys.readouterr()
    assert found == code, text + errors
    assert says in text
    assert errors == ""


def test_run_is_the_suite_from_any_folder_with_results(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    select = "ddp_sum_hook and mlp and 1x2 and float64"
    of_ddp = ("tests/equivalence/test_ddp.py", "tests/difference/test_ddp_differs.py")
    options = ("--json", "results.json", "-k", select)
    code, text, errors = run("run", *of_ddp, *options, folder=tmp_path)
    assert code == 0, text + errors
    assert "compared with one big batch" in text
    found = json.loads(results.read_text())
    assert found["summary"]["same"] >= 2
    assert found["summary"]["known_differences_confirmed"] >= 2
    assert {case["strategy"] for case in found["cases"]} == {"ddp_sum_hook"}
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_an_error_of_the_package_is_not_taken_for_a_difference(user_file: Path) -> None:
    breaks_the_package = (
        "\nimport ddp_equivalence.checking.large_models as checking\nchecking.expected_of = None"
    )
    user_file.write_text(USER_FILE + breaks_the_package)
    code, _, errors = run("check", str(user_file))
    assert code == 3
    assert "Traceback" in errors
    assert "TypeError: 'NoneType' object is not callable" in errors


def test_a_run_that_selects_nothing_says_so_and_fails(tmp_path: Path) -> None:
    (tmp_path / "no_such_case").touch()  # the value of an option is no path
    code, text, _ = run("run", A_FEW, "-k", "no_such_case", folder=tmp_path)
    assert code == 5
    assert "deselected" in text
    assert "NOTHING was compared with one big batch" in text


def test_a_run_in_which_everything_is_skipped_fails(tmp_path: Path, no_cuda: None) -> None:
    select = ("tests/equivalence/test_data_parallel.py", "-k", "test_data_parallel_gives")
    code, text, _ = run("run", *select, "--must-run", "data_parallel", folder=tmp_path)
    assert code == 1
    assert "NOT RUN: needs 2 CUDA devices, found 0" in text
    assert "--must-run data_parallel: FAILED" in text


def test_the_doctor_says_what_runs_and_why_not_the_rest(no_cuda: None) -> None:
    code, text, errors = run("doctor")
    assert code == 0, errors
    assert re.search(r"gloo_fallback         works    \d\d answers right", text)
    assert "nccl                  NOT RUN  needs 2 CUDA devices (one rank each), found 0" in text
    assert "nccl_shared           NOT RUN  needs 1 CUDA device, found 0" in text
    assert "data_parallel         NOT RUN  needs 2 CUDA devices, found 0" in text


def test_the_listing_of_some_faults_has_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--list", "sum_not_mean"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("sum_not_mean\n")
    assert "averaged_twice" not in text


def test_faults_that_cannot_show_on_the_layout_show_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["faults", "sum_not_mean", "--layout", "1x1"]) == 3
    text = capsys.readouterr().out
    assert "nothing was shown: no fault can show" in text
    assert text.startswith("planted ")
