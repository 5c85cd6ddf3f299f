"""A gradient that stops or changes on its way back: the report shows the line at which it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ddp_equivalence import Case, check
from tests.diagnosis.where import cut_steps as steps
from tests.diagnosis.where.faulty import CASE, NEAR, distance, marked_line, where

FOCAL = replace(CASE, loss=steps.focal)
DISTILLED = replace(CASE, loss=steps.distilled)
BRANCHES = replace(CASE, model=steps.Branches)


@pytest.mark.parametrize(
    ("case", "step", "function", "words"),
    [
        (
            FOCAL,
            steps.weights_are_constants,
            steps.weights_are_constants,
            "detach() gives a result",
        ),
        (FOCAL, steps.weights_are_numbers, steps.weights_are_numbers, "item"),
        (FOCAL, steps.weights_without_gradients, steps.weights_without_gradients, "turned off"),
        (CASE, steps.derivative_is_wrong, steps.Steep, "The loss is right"),
        (FOCAL, steps.one_factor_gets_no_gradient, steps.Product, "eturns no gradient for input 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_that_stops_or_changes_a_gradient_is_shown(
    case: Case, step: Callable[..., Any], function: Callable[..., Any], words: str
) -> None:
    found = where(case, step)
    assert found.kind == "own gradient"
    assert words in found.sentence
    assert distance(found, function) == 0
    marked = [one for one in found.lines if one.line.number == marked_line(function)]
    assert marked[0].is_fault


@pytest.mark.parametrize(
    ("step", "function"),
    [
        (steps.hook_on_a_tensor, steps.hook_on_a_tensor),
        (steps.weakened_by_the_world_size, steps.Weakened),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_backward_divides_by_the_world_size_is_not_called_an_average(
    step: Callable[..., Any], function: Any
) -> None:
    found = where(CASE, step)
    assert check(CASE, step).cause is None
    assert distance(found, function) == 0


@pytest.mark.parametrize("step", [steps.logs_and_teaches_and_shifts, steps.teaches_and_clamps])
def test_tensors_that_are_cut_on_purpose_are_not_shown(step: Callable[..., Any]) -> None:
    found = where(DISTILLED, step)
    assert distance(found, step) <= NEAR
    notes = " ".join(one.note for one in found.lines)
    assert "gradient" not in notes
    assert "without a gradient" not in found.sentence


@pytest.mark.parametrize(
    ("case", "step", "words"),
    [
        (
            CASE,
            steps.first_layer_without_gradients,
            "module first is called only where gradients are turned",
        ),
        (CASE, steps.rest_of_a_leaf_is_forgotten, "makes a new leaf"),
        (CASE, steps.head_is_frozen, "sets requires_grad of head.weight, head.bias to False"),
        (BRANCHES, steps.left_in_evaluation_mode, "has a gradient of heads.1.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_that_leaves_parameters_without_a_gradient_is_shown(
    case: Case, step: Callable[..., Any], words: str
) -> None:
    verdict = check(case, step)
    assert verdict.outcome == "different"
    found = verdict.localisation.whereabouts
    assert found is not None
    assert words in found.sentence
    assert distance(found, step) <= NEAR


def test_the_line_that_set_a_number_of_a_module_is_shown() -> None:
    found = where(BRANCHES, steps.another_gain)
    assert distance(found, steps.another_gain) <= NEAR
    assert any("gain = 0.7" in one.note for one in found.lines)
