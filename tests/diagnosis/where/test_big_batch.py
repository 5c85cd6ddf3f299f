"""Own gradients and reduction are right: the report says what divides otherwise, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ddp_equivalence import Case
from tests.diagnosis.where import big_batch_steps as steps
from tests.diagnosis.where.faulty import CASE, NEAR, distance, where

TWO = replace(CASE, layout="1x2")


@pytest.mark.parametrize(
    ("case", "step", "kind", "words"),
    [
        (steps.TOKENS, steps.micro_batch_means, "big batch", "the losses divide by"),
        (TWO, steps.micro_batch_means_by_hand, "big batch", "divide by 5, 3, 5, 3"),
        (
            steps.ROOT,
            steps.root_of_a_batch_mean,
            "big batch",
            "depends on several examples at once, or on none",
        ),
        (steps.PAIRS, steps.pairs_dealt_apart, "big batch", "blocks of its order would give"),
        (CASE, steps.one_micro_batch_counts_twice, "own gradient", "backward pass 1 0.5"),
        (CASE, steps.multiplied_by_a_constant, "own gradient", "1.3 times"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_divides_otherwise_is_found(
    case: Case, step: Callable[..., Any], kind: str, words: str
) -> None:
    found = where(case, step)
    assert found.kind == kind
    assert words.casefold() in found.sentence.casefold()
    assert distance(found, step) <= NEAR
