"""``ddp-equivalence sandbox``: its figures agree, and a wrong one among them is noticed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.checking.check import check
from ddp_equivalence.commands.sandbox import command, table
from ddp_equivalence.commands.sandbox.table import ROWS, FinishedRun, run_problem
from ddp_equivalence.commands.sandbox.training import (
    Problem,
    TrainingResult,
    case_of,
    closed_form,
    loss,
    train,
)

pytestmark = pytest.mark.self_check

NOISE = "--deterministic False --n_experiments 200"


def run(line: str) -> int:
    """The command on ranks that stay warm for the next test."""
    parser = argparse.ArgumentParser()
    command.add(parser)
    return command.run(parser.parse_args(line.split()))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("single", "single 0.0001 16 1 0.99840 0.99840 0 0 agree"),
        ("single --lr 1e-3 --batch_size 128", "0.99800 0.99800 0 0 agree"),
        ("multi --lr 1e-3 --batch_size 16", "0.99800 0.99800 0 0 agree"),
        ("single --lr 1e-3 --batch_size 16", "0.98400 0.98400 0 0 agree"),
        ("multi --lr 8e-3 --batch_size 16", "0.98400 0.98400 0 0 agree"),
        (
            "single --lr 1e-3 --batch-size 128 --n-epochs 2 --deterministic TRUE",
            "0.99600 0.99600 0 0 agree",
        ),
        (f"single --lr 1e-3 {NOISE}", "single 0.001 16 200 0.98"),
        (f"multi --ranks 2 --batch_size 64 {NOISE}", "multi 0.0001 64 x 2 200 0.99981 0.99981"),
    ],
)
def test_the_published_command_lines_agree_with_the_closed_form(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert says in text
    assert " agree" in text
    shows_nothing = "That the ranks agree shows nothing" in text
    assert shows_nothing == (line.startswith("multi") and "False" not in line)


def test_as_published_the_ranks_differ_and_the_suite_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(f"multi --as-published {NOISE}") == 1
    text = capsys.readouterr().out
    assert "  DIFFER\n  deviation: " in text
    assert "variance:" not in text
    assert "DIFFERENT weights at the end, in 100.0% of the experiments" in text
    assert "different: as_published" in text
    assert "[raw_module_called]" in text


def test_with_the_wrapper_called_the_same_step_is_the_big_batch() -> None:
    def mended(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()

    case = case_of(Problem(lr=1e-3, batch_size=16, ranks=8))
    assert check(case, mended, backend="gloo").outcome == "same"


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("", "sandbox"),
        ("single --table", "sandbox"),
        ("single --deterministic maybe", "deterministic"),
        ("single --ranks 2", "ranks"),
        ("multi --ranks 1", "ranks"),
        ("multi --batch_size 33", "batch_size"),
        ("single --as-published", "as_published"),
        ("--table --lr 1e-3", "lr"),
        ("single --lr 1e200", "lr"),
        ("single --lr 0", "lr"),
        ("single --lr nan", "lr"),
        ("multi --batch_size 0", "batch_size"),
        ("multi --batch_size 48", "batch_size"),
        ("multi --batch_size 64", "batch_size"),
        ("multi --ranks 3", "ranks"),
        ("single --n_epochs 0", "n_epochs"),
        ("single --n_experiments 1 --deterministic False", "n_experiments"),
        ("single --lr 0.3 --batch_size 1 --deterministic False", "lr"),
        ("single --n_experiments 1000000000000", "n_experiments"),
        ("--table --seed -1", "seed"),
    ],
)
def test_options_that_cannot_be_right_are_refused_by_name(line: str, field: str) -> None:
    with pytest.raises(BadCase) as caught:
        run(line)
    assert caught.value.field == field


def test_without_scipy_it_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(BadCase, match=r"pip install 'ddp_equivalence\[sandbox\]'"):
        run("--table")
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def done() -> list[FinishedRun]:
    """The table with the same effective batches on fewer ranks, which start sooner."""
    rows = [
        replace(row, problem=replace(row.problem, ranks=2, batch_size=64))
        if row.problem.ranks > 1
        else row
        for row in ROWS
    ]
    return [run_problem(row.problem, row) for row in rows]


def test_all_published_rows_agree(
    done: list[FinishedRun],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [one.wrong for one in done] == [()] * 9
    again = iter(done)
    monkeypatch.setattr(table, "run_problem", lambda *_: next(again))
    assert run("--table") == 0
    text = capsys.readouterr().out
    assert text.count("  agree\n") == 9
    assert "9 of 9 published rows agree" in text
    assert max(map(len, text.splitlines())) <= 100


def wrong_in(result: TrainingResult, row: table.PublishedRow) -> list[str]:
    found = table.with_closed_form(result, closed_form(row.problem))
    return [one.what for one in (*found, *table.with_published(result, row)) if not one.holds]


@pytest.fixture(scope="module")
def right() -> TrainingResult:
    return train(ROWS[2].problem)


@pytest.mark.parametrize("factor", [1.1, 1 / 1.1])
def test_a_variance_that_is_wrong_by_a_tenth_is_refused(
    right: TrainingResult, factor: float
) -> None:
    assert wrong_in(right, ROWS[2]) == []
    mean = right.steps.mean()
    off = TrainingResult(right.weights, mean + (right.steps - mean) * factor**0.5)
    assert wrong_in(off, ROWS[2])[0] == "variance"


def test_a_weight_that_is_off_by_a_hundred_thousandth_is_refused(right: TrainingResult) -> None:
    assert wrong_in(TrainingResult(right.weights + 1e-5, right.steps), ROWS[2]) == ["w"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"variance": "9.2e-09"}, "published variance"),
        ({"variance": "7.6e-09"}, "published variance"),
        ({"w": "0.9982"}, "published w"),
    ],
)
def test_a_published_figure_that_is_wrong_is_refused(
    right: TrainingResult, change: dict[str, str], what: str
) -> None:
    assert wrong_in(right, replace(ROWS[2], **change)) == [what]  # type: ignore[arg-type]


def test_a_wrong_row_without_noise_is_refused_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "ROWS", (replace(ROWS[0], w="0.9981", variance="1e-09"),))
    assert run("--table") == 1
    text = capsys.readouterr().out
    assert "  DIFFER\n  published w: 9.9810e-01 is not in" in text
    assert "published variance: 1.0000e-09 is not in 0.0000e+00 .. 0.0000e+00" in text


def test_ranks_that_differ_do_not_agree_whatever_the_figures(done: list[FinishedRun]) -> None:
    weights = done[3].result.weights.copy()
    weights[1, 0] = np.nextafter(weights[1, 0], 2)
    apart = replace(done[3], result=TrainingResult(weights, done[3].result.steps))
    assert apart.wrong == ("ranks differ",)
