"""A step that is right on one rank shows the line at which more ranks part from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.where import divergence
from ddp_equivalence.diagnosis.where.lines_of_divergences import RIGHT_ALONE
from tests.diagnosis.where import one_rank_steps as steps
from tests.diagnosis.where.faulty import CASE, distance, unnamed
from tests.diagnosis.where.reduction_steps import maximum_instead_of_sum

GAINS = replace(CASE, batch=steps.weighted_rows, loss=steps.relative_gain_loss)
PENALTY = replace(CASE, loss=steps.with_penalty)
SPREAD = replace(GAINS, loss=steps.by_spread)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (GAINS, steps.largest_of_the_rank),
        (PENALTY, steps.penalty_in_every_term),
        (CASE, steps.summed_in_the_wrong_direction),
        (CASE, maximum_instead_of_sum),
        (SPREAD, steps.loops_over_what_the_rank_has),
        (replace(GAINS, shards="5+3+6+2"), steps.largest_of_the_rank),
    ],
    ids=lambda value: getattr(value, "__name__", str(getattr(value, "shards", ""))),
)
def test_the_line_at_which_the_ranks_part_is_marked(case: Case, step: Any) -> None:
    where = unnamed(case, step)
    assert where.beside_one_rank.startswith(RIGHT_ALONE)
    assert where.lines[0].is_fault
    assert distance(where, step) <= 1


@pytest.mark.parametrize("step", [steps.wrong_on_any_number_of_ranks, steps.sends_to_a_neighbour])
def test_a_step_that_is_wrong_on_one_rank_too_is_said_to_be(step: Any) -> None:
    right = step is steps.sends_to_a_neighbour
    where = unnamed(replace(CASE, layout="1x2"), step)
    assert where.beside_one_rank.startswith(RIGHT_ALONE if right else "On one rank the step")


@pytest.mark.parametrize("step", [steps.needs_two_ranks, steps.noisy])
def test_nothing_is_said_of_one_rank_where_it_shows_nothing(step: Any) -> None:
    assert unnamed(CASE, step).beside_one_rank == ""


@pytest.mark.parametrize(
    ("step", "outcome", "times"),
    [("ddp_mean", "same", 0), (steps.wrong_on_any_number_of_ranks, "different", 1)],
)
def test_only_a_difference_without_a_cause_runs_on_one_rank(
    step: Any, outcome: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    monkeypatch.setattr(divergence, "operations_beside_one_rank", lambda *_: runs.append(1))
    assert check(CASE, step).outcome == outcome
    assert len(runs) == times


def test_a_difference_with_a_cause_does_not_run_on_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    monkeypatch.setattr(divergence, "operations_beside_one_rank", lambda *_: runs.append(1))
    verdict = check(CASE, "manual_all_reduce_sum")
    assert verdict.outcome == "different"
    assert not runs
