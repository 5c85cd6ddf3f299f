"""A step that is wrong on one rank as well shows which number or method of its own is wrong."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from ddp_equivalence import check
from ddp_equivalence.diagnosis.where.lines_of_divergences import WRONG_ALONE
from tests.diagnosis.where import own_method_steps as steps
from tests.diagnosis.where.faulty import CASE, distance, unnamed

SQUARES = replace(CASE, loss=steps.mean_of_squares, layout="1x2")
LABELS = replace(
    CASE, model=steps.Labeller, batch=steps.labelled, loss=steps.labelled_loss, layout="1x2"
)


@pytest.mark.parametrize(
    ("step", "within"),
    [
        (steps.kept_gradient_of_a_half, steps.Kept),
        (steps.one_input_of_two, steps.one_input_of_two),
    ],
)
def test_a_backward_method_that_ignores_its_gradient_is_marked(step: Any, within: Any) -> None:
    where = unnamed(SQUARES, step)
    assert where.beside_one_rank == WRONG_ALONE
    assert where.headline == "gradients do not depend on how the loss is scaled"
    assert distance(replace(where, lines=where.lines[:1]), within) == 0


def test_a_backward_method_that_looks_at_its_gradient_is_not_called_deaf() -> None:
    where = unnamed(SQUARES, steps.scaled_gradient_of_one_half)
    assert where.headline != "gradients do not depend on how the loss is scaled"


def test_the_line_that_counts_wrongly_is_shown() -> None:
    where = unnamed(LABELS, steps.counts_of_a_class)
    assert where.headline.startswith("the loss has a wrong factor")
    assert distance(where, steps.Counts) == 0, where.lines


def test_the_line_of_a_helper_that_counts_wrongly_is_shown_beside_the_name() -> None:
    verdict = check(replace(LABELS, loss=steps.places_loss), steps.count_of_a_helper)
    assert verdict.cause == "divided_by_another_count"
    lines, first = inspect.getsourcelines(steps.sizes)
    fault = next(number for number, line in enumerate(lines, first) if "# fault" in line)
    assert f"own_method_steps.py:{fault} " in str(verdict)
