"""A rank's own gradient is not what its rows give: the rank and the line are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ddp_equivalence import Case
from tests.diagnosis.where import own_gradient_steps as steps
from tests.diagnosis.where.faulty import CASE, NEAR, distance, marked_line, where

EVERY = (0, 1, 2, 3)
DROPPING = replace(CASE, model=steps.Dropping)
NORMALISING = replace(CASE, model=steps.Normalising)


@pytest.mark.parametrize(
    ("case", "step", "ranks", "words"),
    [
        (CASE, steps.labels_shifted_on_one_rank, (1,), "its own rows give"),
        (CASE, steps.loss_weight_on_one_rank, (2,), "rank 2 1.75"),
        (
            CASE,
            steps.detached_on_one_rank,
            (1,),
            "the loss is right, and the gradient of norm.bias",
        ),
        (CASE, steps.activations_changed_in_place, (2,), "its own rows give"),
        (
            CASE,
            steps.gradient_hook_on_a_module,
            (0,),
            "the loss is right, and the gradient of norm.bias",
        ),
        (CASE, steps.another_loss_on_one_rank, (0,), "its own rows give"),
        (CASE, steps.rows_normalised_by_rank, EVERY, "the loss of the big batch is"),
        (CASE, steps.targets_of_the_second_micro_batch, EVERY, "backward pass 2 of 2"),
        (CASE, steps.class_weights_by_rank, (0, 1, 2), "their mean is"),
        (DROPPING, steps.dropout_on_one_rank, (1,), "its own rows give"),
        (NORMALISING, steps.training_mode_on_one_rank, (2,), "its own rows give"),
        (CASE, steps.module_skipped_on_one_rank, (1,), "the module norm is not called"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_own_gradient_is_found(
    case: Case, step: Callable[..., Any], ranks: tuple[int, ...], words: str
) -> None:
    found = where(case, step)
    assert found.kind == "own gradient"
    assert found.ranks == ranks
    assert words.casefold() in found.sentence.casefold()
    assert distance(found, step) <= NEAR


def test_a_line_that_only_the_wrong_rank_runs_is_pointed_at() -> None:
    found = where(CASE, steps.labels_shifted_on_one_rank)
    notes = {one.line.number: one.note for one in found.lines}
    fault = marked_line(steps.labels_shifted_on_one_rank)
    assert "only rank 1 runs this line" in notes[fault]
    assert re.fullmatch(r"rank 1: its loss is [\d.]+, its own rows give [\d.]+", found.headline)
