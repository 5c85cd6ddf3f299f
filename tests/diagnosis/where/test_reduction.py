"""The ranks' own gradients are right and reduced wrongly: the call and the line are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.diagnosis.where import reduction_steps as steps
from tests.diagnosis.where.faulty import CASE, NEAR, distance, where

EVERY = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("step", "ranks", "parameters", "words"),
    [
        (steps.maximum_instead_of_sum, EVERY, 8, "all_reduce with MAX over all ranks"),
        (steps.unflattened_in_another_order, EVERY, 8, "not by a factor"),
        (steps.hook_halves_biases_under_ddp, EVERY, 4, "0.5 times"),
        (steps.rank_returns_early, EVERY, 8, "What rank 3 computed is not in these gradients"),
        (steps.decay_added_on_one_rank, (1,), 7, "on rank 1"),
        (steps.only_weights_are_divided, EVERY, 4, "with 4 times the right weight"),
        (steps.biases_in_no_reduction, EVERY, 5, "No collective that Python issued contained them"),
        (steps.copy_not_written_back, EVERY, 4, "the own gradient of rank 0"),
        (steps.reduced_to_one_rank, (1, 2, 3), 8, "reduce with SUM"),
        (steps.wrong_modulo_of_no_sync, EVERY, 8, "number 4 stayed on the rank itself"),
        (steps.communication_hook_sums_halves, EVERY, 5, "After backward the gradients were"),
        (steps.clamped_after_reducing, EVERY, 8, "not by a factor"),
        (steps.weights_of_ranks, EVERY, 8, "rank 0 0.1, rank 1 0.2, rank 2 0.3, rank 3 0.4"),
        (steps.transposed_on_the_way, EVERY, 1, "not by a factor"),
        (steps.cleared_between_micro_batches, EVERY, 8, "number 1 left nothing"),
        (steps.tail_hook_on_one_rank, (2,), 1, "rank 2 0.75"),
        (steps.tail_not_reduced, EVERY, 1, "Elements 1 to 2 of head.bias are each rank's own"),
        (steps.tail_stays_zero, EVERY, 1, "They are the last 2 of all 171 elements."),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_reduction_is_found(
    step: Callable[..., Any], ranks: tuple[int, ...], parameters: int, words: str
) -> None:
    found = where(CASE, step)
    assert found.kind == "reduction"
    assert found.ranks == ranks
    assert len(found.parameters) == parameters
    assert words.casefold() in found.sentence.casefold()
    assert distance(found, step) <= NEAR
