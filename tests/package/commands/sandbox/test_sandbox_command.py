"""``ddp-equivalence sandbox`` as its user types it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.checking.check import check
from ddp_equivalence.commands.sandbox import command, table, training
from ddp_equivalence.commands.sandbox.table import ROWS, PublishedRow
from ddp_equivalence.commands.sandbox.training import Problem, case_of, mended
from tests.package.commands.sandbox.test_neurons_side_by_side import dies_on_rank_1

ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.self_check

FEW = "--n_experiments=200"
NOISE = ("--deterministic", "False")


def run(*arguments: str) -> int:
    """The command on ranks that stay warm for the next test."""
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    return command.run(parser.parse_args(["sandbox", *arguments]))


def test_single_prints_both_figures_and_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    spelled = "--lr 1e-3 --batch_size 16 --n_epochs 1 --deterministic False --n_experiments 1000"
    assert run("single", *spelled.split()) == 0
    text = capsys.readouterr().out
    assert "16 steps; 1,000 experiments" in text
    assert text.count("   agree") == 3


def test_dashes_are_the_same_and_without_noise_one_experiment_is_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--lr 1e-3 --batch-size 128 --n-epochs 2 --deterministic TRUE"
    assert run("single", *options.split()) == 0
    text = capsys.readouterr().out
    assert "4 steps; 1 experiment, no noise" in text
    assert "0.996000" in text


@pytest.mark.parametrize(
    ("published", "w"),
    [
        ("single --lr 1e-3 --batch_size 128", "0.9980"),
        ("multi --lr 1e-3 --batch_size 16", "0.9980"),
        ("single --lr 1e-3 --batch_size 16", "0.9840"),
        ("multi --lr 8e-3 --batch_size 16", "0.9840"),
    ],
)
def test_published_command_lines_without_noise_give_the_published_weight(
    published: str, w: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*published.split()) == 0
    text = capsys.readouterr().out
    assert "1 experiment, no noise" in text
    assert f"{w}00" in text


def test_the_defaults_are_those_of_the_published_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("single") == 0
    assert "batch 16, lr 0.0001, 1 epoch" in capsys.readouterr().out


def test_multi_says_that_all_ranks_hold_the_same_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("multi", "--ranks", "2", "--batch_size", "64", *NOISE, FEW) == 0
    assert "all 2 ranks hold the same weights" in capsys.readouterr().out


def test_as_published_the_ranks_differ_and_the_suite_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("multi", "--as-published", *NOISE, FEW) == 1
    text = capsys.readouterr().out
    of_variance = next(line for line in text.splitlines() if "all update steps" in line)
    of_deviation = next(line for line in text.splitlines() if "deviation of w" in line)
    assert of_variance.endswith("   agree")
    assert of_deviation.endswith("DO NOT AGREE")
    assert "DIFFERENT weights at the end, in 100.0% of the experiments" in text
    assert "different: as_published" in text
    assert "[raw_module_called]" in text


def test_with_the_wrapper_called_the_same_step_is_the_big_batch() -> None:
    case = case_of(Problem(lr=1e-3, batch_size=16, ranks=8))
    assert check(case, mended, backend="gloo").outcome == "same"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("", "sandbox"),
        ("single --table", "sandbox"),
        ("single --deterministic maybe", "deterministic"),
        ("single --deterministic 0", "deterministic"),
        ("single --ranks 2", "ranks"),
        ("multi --ranks 1", "ranks"),
        ("multi --batch_size 33", "batch_size"),
        ("single --as-published", "as_published"),
        ("--table --lr 1e-3", "lr"),
        ("single --json out.json", "json"),
        ("--table --json /nowhere/at/all/out.json", "json"),
        ("--table --json .", "json"),
        ("single --lr 1e200", "lr"),
        ("single --n_experiments 1000000000000", "n_experiments"),
        ("--table --seed -1", "seed"),
    ],
)
def test_options_that_cannot_be_right_are_refused_by_name(arguments: str, field: str) -> None:
    with pytest.raises(BadCase) as caught:
        run(*arguments.split())
    assert caught.value.field == field


def interrupted_in(row: int) -> Callable[..., table.FinishedRow]:
    run_row, begun = table.run_row, []

    def instead(*arguments: object) -> table.FinishedRow:
        begun.append(arguments)
        if len(begun) == row:
            raise KeyboardInterrupt
        return run_row(ROWS[0])

    return instead


def test_an_interrupted_table_keeps_the_rows_that_are_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(table, "run_row", interrupted_in(row=4))
    path = tmp_path / "rows.json"
    try:
        code = run("--table", "--json", str(path))
    except KeyboardInterrupt:  # it would end all tests
        pytest.fail("the interruption got out, and with it the rows")
    assert code == 130
    text = capsys.readouterr().out
    assert text.count("single ") == 3
    assert "interrupted: 3 of 9 rows done" in text
    written = json.loads(path.read_text())
    assert (written["interrupted"], written["rows_done"], len(written["rows"])) == (True, 3, 3)


def test_a_table_with_a_row_that_does_not_agree_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_row, first = table.run_row, ROWS[0]
    wrong = PublishedRow(first.mode, first.problem, "0.9970", "0")
    monkeypatch.setattr(table, "run_row", lambda *_: run_row(wrong))
    assert run("--table") == 1
    assert "does not agree: published w" in capsys.readouterr().out


def test_a_rank_that_fails_is_blamed_without_a_traceback_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "multi", partial(training.multi, on_each_rank=dies_on_rank_1))
    assert run("multi", "--ranks=2", FEW) == 3
    errors = capsys.readouterr().err
    assert "Root cause: rank 1 (node 0, local rank 1) RuntimeError: the noise ran out" in errors
    assert "rank_set.py" not in errors


def hide(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    """Let the sandbox find every package but one."""
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == hidden else name)


@pytest.mark.parametrize("arguments", ["single", "multi --ranks 2", "--table"])
def test_without_scipy_what_needs_intervals_is_refused_before_anything_runs(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "scipy")
    with pytest.raises(BadCase, match=r"pip install 'ddp_equivalence\[sandbox\]'"):
        run(*arguments.split())
    assert capsys.readouterr().out == ""
