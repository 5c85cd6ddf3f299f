"""The nine published rows agree, and a wrong figure among them is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_equivalence.commands.sandbox import table
from ddp_equivalence.commands.sandbox.table import (
    ROWS,
    WIDEST,
    PublishedRow,
    so_far_off,
    with_closed_form,
    with_published,
)
from ddp_equivalence.commands.sandbox.training import Problem, TrainingResult, closed_form, train


def on_two_ranks(row: PublishedRow) -> PublishedRow:
    """The same effective batch on fewer ranks, which start sooner."""
    if row.mode == "single":
        return row
    return replace(row, problem=replace(row.problem, ranks=2, batch_size=64))


@pytest.fixture(scope="module")
def done() -> list[table.FinishedRow]:
    return [table.run_row(on_two_ranks(row)) for row in ROWS]


def test_all_published_rows_agree(done: list[table.FinishedRow]) -> None:
    assert [one.wrong for one in done] == [()] * 9


def test_rows_with_too_few_steps_go_on_to_more_experiments(done: list[table.FinishedRow]) -> None:
    counts = [[part.problem.n_experiments for part in one.runs] for one in done]
    assert counts == [
        [1],
        [1],
        [10_000],
        [10_000],
        [1],
        [1],
        [1000],
        [1000, 10_000],
        [1000, 10_000],
    ]
    assert all(one.runs[-1].width < WIDEST for one in done)


def test_the_table_says_what_was_held_against_what(done: list[table.FinishedRow]) -> None:
    text = "\n".join(
        [*table.head_lines(), *(line for one in done for line in table.row_lines(one))]
    )
    assert text.count("agree\n") + text.endswith("agree") == 9
    assert "too wide to exclude a factor of 1.1\n" in text
    assert max(map(len, text.splitlines())) <= 100
    foot = "\n".join(table.foot_lines(done))
    assert "9 of 9 published rows agree" in foot
    assert "-0.0078 at batch 16, -0.0010 at batch 128" in foot


PROBLEM = Problem(lr=1e-3, batch_size=128)


@pytest.fixture(scope="module")
def right() -> TrainingResult:
    return train(PROBLEM)


def wrong_in(outcome: TrainingResult, problem: Problem = PROBLEM) -> list[str]:
    found = with_closed_form(outcome, closed_form(problem))
    return [one.what for one in found if one.holds is not True]


@pytest.mark.parametrize("factor", [1.1, 1 / 1.1])
def test_a_variance_that_is_wrong_by_a_tenth_is_refused(
    right: TrainingResult, factor: float
) -> None:
    assert wrong_in(right) == []
    off = TrainingResult(right.weights, right.step_means, right.step_squares * factor)
    assert wrong_in(off) == ["variance"]


def test_a_weight_that_is_off_by_a_hundred_thousandth_is_refused(right: TrainingResult) -> None:
    off = TrainingResult(right.weights + 1e-5, right.step_means, right.step_squares)
    assert wrong_in(off) == ["w"]


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
    row = replace(ROWS[2], **change)  # type: ignore[arg-type]  # both are text
    found = with_published(right, closed_form(row.problem), row)
    assert [one.what for one in found if not one.holds] == [what]


def test_a_wrong_row_without_noise_is_refused() -> None:
    row = replace(ROWS[0], w="0.9981", variance="1e-09")
    found = table.run_row(row)
    assert found.wrong == ("published w", "published variance")
    assert "DIFFER" in "\n".join(table.row_lines(found))


def test_ranks_that_differ_do_not_agree_whatever_the_figures(done: list[table.FinishedRow]) -> None:
    part = done[3].runs[0]
    weights = part.result.weights.copy()
    weights[1, 0] += 1e-15
    apart = replace(part, result=replace(part.result, weights=weights))
    assert replace(done[3], runs=(apart,)).wrong == ("ranks differ",)


def test_a_learning_rate_beyond_the_closed_form_is_not_judged() -> None:
    problem = Problem(lr=0.3, batch_size=1, n_experiments=50)
    found = with_closed_form(train(problem), closed_form(problem))
    assert [one.holds for one in found] == [None] * 3
    assert "too large for the closed form" in found[0].why


def test_a_published_weight_is_likelier_from_ranks_that_never_reduced() -> None:
    row = next(one for one in ROWS if (one.mode, one.w) == ("multi", "0.9848"))
    reduced, never = so_far_off(closed_form(row.problem), row)
    # The distance is 8.8e-5 beside the rounding; the error is 1.038e-3 / sqrt(1000), or sqrt(8) x.
    assert reduced == pytest.approx(0.0075, rel=0.02)
    assert never == pytest.approx(0.344, rel=0.02)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (3, "published w: as near as its four digits allow, whether ranks reduce or not"),
        (7, "published w: 0.746 % of runs are as far off if ranks reduce, "),
    ],
)
def test_the_table_says_what_a_published_weight_shows(
    done: list[table.FinishedRow], number: int, says: str
) -> None:
    assert says in "\n".join(table.row_lines(done[number]))
