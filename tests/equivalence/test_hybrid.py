"""The sum inside a node or a rank, and the average between them, where that is the big batch."""

from __future__ import annotations

import pytest

from ddp_equivalence import assert_equivalent
from ddp_equivalence.strategies.catalogue import Trial


@pytest.mark.promise_of("hybrid")
def test_hybrid_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("hybrid_data_parallel")
def test_data_parallel_inside_each_rank_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)
