"""Lines whose order is wrong, weights without a gradient that change, and methods of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.setting import PointedLine
from tests.diagnosis.where import one_rank_steps
from tests.diagnosis.where import order_steps as steps
from tests.diagnosis.where.faulty import CASE, NEAR, marked_line, where

GUIDED = Case(model=steps.Guided, batch=CASE.batch, loss=steps.guided, layout="1x2")
PAIRS = replace(CASE, model=one_rank_steps.Scores, loss=one_rank_steps.pair_loss, layout="1x2")
MOMENT = replace(CASE, loss=steps.moment, layout="1x2")
SUMMED = replace(CASE, layout="1x2")


def _marked(lines: tuple[PointedLine, ...]) -> list[int]:
    return [one.line.number for one in lines if one.is_fault]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (steps.guide_follows_first, "changes slow."),
        (steps.guide_is_scaled, "changes slow.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_line_that_changes_weights_without_gradients_before_backward_is_marked(
    step: Callable[..., Any], words: str
) -> None:
    found = where(GUIDED, step)
    assert marked_line(step) in _marked(found.lines)
    assert any(words in one.note and "before backward" in one.note for one in found.lines)


def test_weights_that_are_put_back_are_not_blamed() -> None:
    found = where(GUIDED, steps.guide_is_scaled_and_put_back)
    assert not any("before backward" in one.note for one in found.lines)
    assert marked_line(steps.guide_is_scaled_and_put_back) in _marked(found.lines)


@pytest.mark.parametrize(
    ("case", "step", "function", "cause"),
    [
        (CASE, steps.shrinks_first, steps.shrinks_first, "clipped_before_reduce"),
        (
            SUMMED,
            steps.differentiates_too_late,
            steps.differentiates_too_late,
            "backward_after_reduction",
        ),
        (MOMENT, steps.moment_of_all, steps.MeanOfRanks, "gather_without_gradient"),
        (
            PAIRS,
            one_rank_steps.own_rows_only_on_the_way_back,
            one_rank_steps.own_rows_only_on_the_way_back,
            "gather_without_gradient",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_faulty_line_is_marked_and_not_that_of_a_helper(
    case: Case, step: Callable[..., Any], function: Callable[..., Any], cause: str
) -> None:
    verdict = check(case, step)
    assert (verdict.outcome, verdict.causes) == ("different", (cause,)), verdict
    assert _marked(verdict.findings[0].lines) == [marked_line(function)]


def test_a_backward_method_that_returns_no_gradient_is_marked() -> None:
    verdict = check(CASE, steps.loses_the_right_factor)
    assert verdict.outcome == "different"
    found = verdict.localisation.whereabouts
    assert found is not None
    assert abs(_marked(found.lines)[0] - marked_line(steps.Outer)) <= NEAR + 1
    assert "returns no gradient for input 1 of Outer" in found.sentence
